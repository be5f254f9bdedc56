"""The experts of transformers, by Qwen3-MoE's class, whose code most other models share."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from benchmarks.contender import AutogradContender
from benchmarks.linear_layout import from_linear_layout, to_linear_layout
from benchmarks.problem import Problem

# Eager indexes each expert's matrix in the stack, so that its gradient is a stack of zeros except for the matrix.
GRADIENT_COPIES = {"grouped_mm": 1, "eager": 2}


class TransformersExperts(AutogradContender):
    """`Qwen3MoeExperts`.

    Args:
        implementation: "grouped_mm" or "eager", as in `from_pretrained(..., experts_implementation=...)`.
    """

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.name = f"transformers {implementation}"
        self.gradient_copies = GRADIENT_COPIES[implementation]

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        _, D, F, E, K = problem.shape
        config = Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K)
        config._experts_implementation = self.implementation
        with torch.device("meta"):
            self.module = Qwen3MoeExperts(config)
        self.layout = to_linear_layout(problem)
        self.module.gate_up_proj = nn.Parameter(self.layout.gate_up)
        self.module.down_proj = nn.Parameter(self.layout.down)
        self.experts = problem.experts
        self.set_leaves(problem, x=problem.x, weights=problem.weights.to(problem.dtype))
        self.leaves |= dict(self.module.named_parameters())

    def compute(self) -> Tensor:
        """See `AutogradContender`."""
        output: Tensor = self.module(self.leaves["x"], self.experts, self.leaves["weights"])
        return output

    def in_layout_of_problem(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """See `Contender`."""
        x, weights, gate_up, down = gradients
        return {"x": x, "weights": weights, **from_linear_layout(gate_up, down)}
