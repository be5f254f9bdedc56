"""Arguments of expert_ffn, drawn at random."""

from typing import Any

import torch

from maxmoe import ops
from support.operator_calls import Call
from support.shapes import Shape

PARAMETERS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def ffn_call(shape: Shape, *, gated: bool = True, bias: bool = True, **options: Any) -> Call:
    num_experts, hidden_size, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=torch.float64)

    return Call(
        "expert_ffn",
        {
            "x": random(shape.num_tokens, hidden_size),
            "weights": random(shape.num_tokens, shape.top_k),
            "plan": options.pop("plan", None) or ops.ragged_plan(shape.experts(), num_experts),
            "gate": random(num_experts, hidden_size, inner) / max(hidden_size, 1) ** 0.5 if gated else None,
            "up": random(num_experts, hidden_size, inner) / max(hidden_size, 1) ** 0.5,
            "down": random(num_experts, inner, hidden_size) / max(inner, 1) ** 0.5,
            "gate_bias": random(num_experts, inner) if gated and bias else None,
            "up_bias": random(num_experts, inner) if bias else None,
            "down_bias": random(num_experts, hidden_size) if bias else None,
            **options,
        },
    )


def with_fused_gate(call: Call, layout: str) -> Call:
    """The same call with the gate in `up`."""

    def fused(gate: torch.Tensor | None, up: torch.Tensor | None) -> torch.Tensor | None:
        if gate is None or up is None:
            return None
        return torch.cat([gate, up], -1) if layout == "concatenated" else torch.stack([gate, up], -1).flatten(-2)

    gate, up, gate_bias, up_bias = (call.arguments[name] for name in ("gate", "up", "gate_bias", "up_bias"))
    both = {"up": fused(gate, up), "up_bias": fused(gate_bias, up_bias)}
    return call.replace(gate=None, gate_bias=None, fused_gate=layout, **both)
