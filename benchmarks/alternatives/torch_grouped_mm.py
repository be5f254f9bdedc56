"""torch.nn.functional.grouped_mm, as one would write it by hand."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from benchmarks.contender import AutogradContender
from benchmarks.problem import Problem


class TorchGroupedMM(AutogradContender):
    """Sort, gather, one product for gate and up, one for down, multiply by weights, sum."""

    name = "torch grouped_mm"

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        self.experts = problem.experts
        self.set_leaves(
            problem,
            x=problem.x,
            weights=problem.weights.to(problem.dtype),
            gate_up=torch.cat([problem.gate, problem.up], 2),
            down=problem.down,
        )

    def compute(self) -> Tensor:
        """See `AutogradContender`."""
        x, weights, gate_up, down = self.leaves.values()
        expert_of_slot = self.experts.flatten()
        slots = expert_of_slot.argsort(stable=True)
        tokens = slots // self.experts.shape[1]
        ends = expert_of_slot.bincount(minlength=len(down)).cumsum(0).to(torch.int32)
        gate, up = grouped_mm(x.index_select(0, tokens), gate_up, offs=ends).chunk(2, 1)
        rows = grouped_mm(silu(gate) * up, down, offs=ends)
        rows = rows * weights.flatten().index_select(0, slots).unsqueeze(1)
        return torch.zeros_like(x).index_add(0, tokens, rows)

    def in_layout_of_problem(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """See `Contender`."""
        x, weights, gate_up, down = gradients
        gate, up = gate_up.chunk(2, 2)
        return {"x": x, "weights": weights, "gate": gate, "up": up, "down": down}
