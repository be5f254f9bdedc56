"""maxmoe.ops.expert_ffn, with its plan."""

from torch import Tensor

from benchmarks.contender import AutogradContender
from benchmarks.problem import Problem
from maxmoe.ops import expert_ffn, ragged_plan


class MaxmoeExperts(AutogradContender):
    """Ours.

    Args:
        num_local_experts: compute these many experts only, with all tokens there, as on one of several ranks.
        first_expert: the first of them.
    """

    kind = "maxmoe"
    name = "maxmoe"

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
        # All rows are ours: their number needs no counting, as in the layer.
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
