"""maxmoe.ops.expert_ffn, with its plan, in both layouts of the weights."""

from collections.abc import Sequence

from torch import Tensor

from benchmarks.contender import AutogradContender
from benchmarks.linear_layout import from_linear_layout, to_linear_layout
from benchmarks.problem import Problem
from maxmoe.ops import expert_ffn, ragged_plan


class MaxmoeExperts(AutogradContender):
    """maxmoe with row-major weights.

    Args:
        num_local_experts: number of computed experts, for all tokens, as on one of several ranks.
        first_expert: first computed expert.
    """

    kind = "maxmoe"
    name = "maxmoe"
    weight_copies = 0

    def __init__(self, num_local_experts: int | None = None, first_expert: int = 0) -> None:
        self.num_local_experts = num_local_experts
        self.first_expert = first_expert

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        num_experts = problem.shape.num_experts
        count = self.num_local_experts or num_experts
        local = slice(self.first_expert, self.first_expert + count)
        self.experts = problem.experts
        self.num_experts = num_experts
        # All rows are local, so that they need not be counted, as in the layer.
        self.num_rows = problem.shape.num_rows if count == num_experts else None
        self.set_leaves(
            problem,
            x=problem.x,
            weights=problem.weights,
            gate=problem.gate[local],
            up=problem.up[local],
            down=problem.down[local],
        )

    def compute(self) -> Tensor:
        """See `AutogradContender`."""
        leaf = self.leaves
        plan = ragged_plan(
            self.experts,
            self.num_experts,
            first_expert=self.first_expert,
            num_local_experts=len(leaf["up"]),
            num_rows=self.num_rows,
        )
        return expert_ffn(leaf["x"], leaf["weights"], plan, leaf["gate"], leaf["up"], leaf["down"])


class MaxmoeLinearLayout(AutogradContender):
    """maxmoe with weights as published models store them: transposed views, gate and up in one matrix."""

    kind = "maxmoe"
    name = "maxmoe, linear layout"

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        self.shape = problem.shape
        self.experts = problem.experts
        self.layout = to_linear_layout(problem)
        self.set_leaves(
            problem, x=problem.x, weights=problem.weights, gate_up=self.layout.gate_up, down=self.layout.down
        )

    def compute(self) -> Tensor:
        """See `AutogradContender`."""
        x, weights, gate_up, down = self.leaves.values()
        plan = ragged_plan(self.experts, self.shape.num_experts, num_rows=self.shape.num_rows)
        up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return expert_ffn(x, weights, plan, None, up, down, fused_gate="concatenated")

    def in_layout_of_problem(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """See `Contender`."""
        x, weights, gate_up, down = gradients
        return {"x": x, "weights": weights, **from_linear_layout(gate_up, down)}
