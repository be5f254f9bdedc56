"""maxmoe.ops.expert_ffn through ATen, as on devices without kernels of maxmoe."""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts
from benchmarks.contender import AutogradContender
from benchmarks.problem import Problem
from maxmoe.ops import expert_ffn, force_aten, ragged_plan


class ThroughAten(AutogradContender):
    """maxmoe with the path of devices other than the CPU."""

    def forward(self) -> Tensor:
        """See `Contender`."""
        with force_aten():
            return super().forward()

    def step(self) -> tuple[Tensor, Sequence[Tensor]]:
        """See `Contender`."""
        with force_aten():
            return super().step()


class MaxmoeThroughAten(ThroughAten):
    """maxmoe with gate and up in one matrix."""

    kind = "maxmoe"
    name = "maxmoe, through ATen"

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        self.experts = problem.experts
        self.num_rows = problem.shape.num_rows
        gate_up = torch.cat([problem.gate, problem.up], 2)
        self.set_leaves(problem, x=problem.x, weights=problem.weights, gate_up=gate_up, down=problem.down)

    def compute(self) -> Tensor:
        """See `AutogradContender`."""
        x, weights, gate_up, down = self.leaves.values()
        plan = ragged_plan(self.experts, len(down), num_rows=self.num_rows)
        return expert_ffn(x, weights, plan, None, gate_up, down, fused_gate="concatenated")

    def in_layout_of_problem(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """See `Contender`."""
        x, weights, gate_up, down = gradients
        gate, up = gate_up.chunk(2, 2)
        return {"x": x, "weights": weights, "gate": gate, "up": up, "down": down}


class MaxmoeApartThroughAten(ThroughAten, MaxmoeExperts):
    """The same with separate gate and up, as in the layer."""

    name = "maxmoe, through ATen, gate and up apart"
