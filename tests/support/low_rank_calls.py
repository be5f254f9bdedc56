"""Calls of expert_ffn and gmm with random low-rank factors."""

from typing import Any

import torch
from torch import Tensor

from maxmoe import ops
from support.operator_calls import Call
from support.shapes import Shape

PROJECTIONS = ("gate", "up", "down")
RANKS = {"gate": 1, "up": 3, "down": 2}


def with_factors(call: Call, ranks: dict[str, int] = RANKS, scale: float = 1.0) -> Call:
    """The call with random factors beside the matrices that it has."""
    fields: dict[str, Any] = {}
    for name, rank in ranks.items():
        matrices = call.arguments.get(name)
        if matrices is None:
            continue
        count, inner, outer = matrices.shape
        fields[f"{name}_factors.a"] = torch.randn(count, inner, rank, dtype=torch.float64) / max(inner, 1) ** 0.5
        fields[f"{name}_factors.b"] = torch.randn(count, rank, outer, dtype=torch.float64) / (2 * rank**0.5)
        fields[f"{name}_factors.scale"] = scale
    return call.replace(**fields)


def gmm_call(shape: Shape, rank: int = 3, **options: Any) -> Call:
    """Rows of the first and the last groups belong to other ranks, and rows past the last one to no group."""
    plan = ops.ragged_plan(shape.experts(), shape.num_experts)
    count, hidden_size, width = max(shape.num_experts - 2, 1), shape.hidden_size, shape.intermediate_size

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.float64)

    return Call(
        "gmm",
        {
            "lhs": random(len(plan.slots) + 2, hidden_size),
            "rhs": random(count, hidden_size, width) / max(hidden_size, 1) ** 0.5,
            "group_sizes": plan.group_sizes,
            "rhs_bias": random(count, width),
            "group_offset": 1 if shape.num_experts > 2 else 0,
            "rhs_factors.a": random(count, hidden_size, rank) / max(hidden_size, 1) ** 0.5,
            "rhs_factors.b": random(count, rank, width) / max(rank, 1) ** 0.5,
            **options,
        },
    )
