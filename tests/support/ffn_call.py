"""Arguments of expert_ffn, drawn at random, and the cases of its options."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from maxmoe import ops
from support import activations
from support.low_rank_calls import with_factors
from support.operator_calls import Call
from support.shapes import Shape

PARAMETERS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def ffn_call(shape: Shape, *, gated: bool = True, bias: bool = True, **options: Any) -> Call:
    num_experts, hidden_size, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size

    def random(*sizes: int) -> Tensor:
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


def fused(layout: str, gate: Tensor | None, up: Tensor | None) -> Tensor | None:
    """One tensor with the columns of two."""
    if gate is None or up is None:
        return None
    return torch.cat([gate, up], -1) if layout == "concatenated" else torch.stack([gate, up], -1).flatten(-2)


def with_fused_gate(call: Call, layout: str) -> Call:
    """The same call with the gate in `up`."""
    gate, up, gate_bias, up_bias = (call.arguments[name] for name in ("gate", "up", "gate_bias", "up_bias"))
    both = {"up": fused(layout, gate, up), "up_bias": fused(layout, gate_bias, up_bias)}
    return call.replace(gate=None, gate_bias=None, fused_gate=layout, **both)


Make = Callable[[Shape], Call]
SWIGLUOAI = {"activation": "swigluoai", "limit": 0.75}
# Each option of the experts beside each other one.
CASES: dict[str, Make] = {
    "gated": ffn_call,
    "no bias": partial(ffn_call, bias=False, activation="gelu"),
    "no weights": partial(ffn_call, weights=None, activation="gelu_tanh"),
    "biases, clipped": partial(ffn_call, **SWIGLUOAI),
    "plain, biases": partial(ffn_call, gated=False, activation="relu2"),
    "plain": partial(ffn_call, gated=False, bias=False),
    "plain, no weights": partial(ffn_call, gated=False, bias=False, weights=None, activation="relu2"),
    "concatenated": lambda shape: with_fused_gate(ffn_call(shape, limit=0.5), "concatenated"),
    "interleaved": lambda shape: with_fused_gate(ffn_call(shape, bias=False, **SWIGLUOAI), "interleaved"),
}
WITH_FACTORS: dict[str, Make] = {
    "factors, no bias": lambda shape: with_factors(ffn_call(shape, bias=False, activation="gelu"), scale=1.75),
    "factors, no weights": lambda shape: with_factors(ffn_call(shape, weights=None)),
    "factors, plain": lambda shape: with_factors(ffn_call(shape, gated=False, activation="relu2"), scale=0.5),
    "factors, limited output": lambda shape: with_factors(ffn_call(shape, **activations.LIMITED_OUTPUT)),
    "factors, concatenated": lambda shape: with_factors(
        with_fused_gate(ffn_call(shape, **activations.SITU), "concatenated")
    ),
    "factors, interleaved": lambda shape: with_factors(
        with_fused_gate(ffn_call(shape, **SWIGLUOAI), "interleaved"), scale=1.75
    ),
    "factors of gate": lambda shape: with_factors(ffn_call(shape, bias=False), {"gate": 5}),
    "factors of up, concatenated": lambda shape: with_factors(
        with_fused_gate(ffn_call(shape), "concatenated"), {"up": 5}
    ),
    "factors of up, plain": lambda shape: with_factors(ffn_call(shape, gated=False), {"up": 5}),
    "factors of down": lambda shape: with_factors(ffn_call(shape), {"down": 5}),
    "factors of gate and down": lambda shape: with_factors(ffn_call(shape, weights=None), {"gate": 5, "down": 5}),
}
EACH: dict[str, Make] = CASES | WITH_FACTORS
