"""Calls of expert_ffn and gmm with random arguments, and the cases of the options of expert_ffn."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maxmoe import ops
from maxmoe.quantization import QuantizedStack
from support import activations
from support.operator_calls import Call
from support.shapes import Shape

PROJECTIONS = ("gate", "up", "down")
PARAMETERS = (*PROJECTIONS, "gate_bias", "up_bias", "down_bias")
RANKS = {"gate": 1, "up": 3, "down": 2}


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def matrices(count: int, inner: int, outer: int) -> Tensor:
    """Matrices whose products have values near one."""
    return random(count, inner, outer) / max(inner, 1) ** 0.5


def ffn_call(
    shape: Shape,
    *,
    gated: bool = True,
    bias: bool = True,
    fused_gate: str | None = None,
    ranks: dict[str, int] | None = None,
    scale: float = 1.0,
    **options: Any,
) -> Call:
    """expert_ffn, with the gate in `up` if `fused_gate` is a layout, and with factors if there are ranks."""
    count, hidden_size, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
    arguments = {
        "x": random(shape.num_tokens, hidden_size),
        "weights": random(shape.num_tokens, shape.top_k),
        "plan": options.pop("plan", None) or ops.ragged_plan(shape.experts(), count),
        "gate": matrices(count, hidden_size, inner) if gated else None,
        "up": matrices(count, hidden_size, inner),
        "down": matrices(count, inner, hidden_size),
        "gate_bias": random(count, inner) if gated and bias else None,
        "up_bias": random(count, inner) if bias else None,
        "down_bias": random(count, hidden_size) if bias else None,
    }
    if fused_gate is not None:
        for field in ("", "_bias"):
            gate, up = arguments.pop(f"gate{field}"), arguments[f"up{field}"]
            arguments |= {f"gate{field}": None, f"up{field}": fused(fused_gate, gate, up)}
        arguments["fused_gate"] = fused_gate
    return with_factors(Call("expert_ffn", {**arguments, **options}), ranks or {}, scale)


def fused(layout: str, gate: Tensor | None, up: Tensor | None) -> Tensor | None:
    """One tensor with the columns of two."""
    if gate is None or up is None:
        return None
    return torch.cat([gate, up], -1) if layout == "concatenated" else torch.stack([gate, up], -1).flatten(-2)


def with_factors(call: Call, ranks: dict[str, int] = RANKS, scale: float = 1.0) -> Call:
    """The call with random low-rank factors beside the matrices that it has."""
    fields: dict[str, Any] = {}
    for name, rank in ranks.items():
        if call.arguments.get(name) is not None:
            count, inner, outer = call.arguments[name].shape
            fields[f"{name}_factors.a"] = matrices(count, inner, rank)
            fields[f"{name}_factors.b"] = matrices(count, rank, outer) / 2
            fields[f"{name}_factors.scale"] = scale
    return call.replace(**fields)


def gmm_call(groups: Sequence[int], rhs: Tensor | QuantizedStack, rank: int = 0, **options: Any) -> Call:
    """gmm of groups of rows, and two rows of no group, with factors if they have a rank."""
    count, hidden_size, width = rhs.shape
    arguments = {
        "lhs": random(sum(groups) + 2, hidden_size),
        "rhs": rhs,
        "group_sizes": torch.tensor(groups, dtype=torch.int64),
        "rhs_bias": random(count, width),
    }
    call = Call("gmm", {**arguments, **options})
    return with_factors(call, {"rhs": rank}) if rank else call


def factored_gmm_call(shape: Shape, rank: int = 3) -> Call:
    """gmm with factors, where the rows of the first and the last group belong to other ranks."""
    groups = ops.ragged_plan(shape.experts(), shape.num_experts).group_sizes.tolist()
    rhs = matrices(max(shape.num_experts - 2, 1), shape.hidden_size, shape.intermediate_size)
    return with_factors(gmm_call(groups, rhs, group_offset=1 if shape.num_experts > 2 else 0), {"rhs": rank})


# Each option of the experts beside each other one, as options of `ffn_call`.
SWIGLUOAI = {"activation": "swigluoai", "limit": 0.75}
CASES: dict[str, dict[str, Any]] = {
    "gated": {},
    "no bias": {"bias": False, "activation": "gelu"},
    "no weights": {"weights": None, "activation": "gelu_tanh"},
    "biases, clipped": SWIGLUOAI,
    "plain, biases": {"gated": False, "activation": "relu2"},
    "plain": {"gated": False, "bias": False},
    "plain, no weights": {"gated": False, "bias": False, "weights": None, "activation": "relu2"},
    "concatenated": {"fused_gate": "concatenated", "limit": 0.5},
    "interleaved": {"fused_gate": "interleaved", "bias": False, **SWIGLUOAI},
}
EACH: dict[str, dict[str, Any]] = {
    **CASES,
    "factors, no bias": {"ranks": RANKS, "scale": 1.75, "bias": False, "activation": "gelu"},
    "factors, no weights": {"ranks": RANKS, "weights": None},
    "factors, plain": {"ranks": RANKS, "scale": 0.5, "gated": False, "activation": "relu2"},
    "factors, limited output": {"ranks": RANKS, **activations.LIMITED_OUTPUT},
    "factors, concatenated": {"ranks": RANKS, "fused_gate": "concatenated", **activations.SITU},
    "factors, interleaved": {"ranks": RANKS, "scale": 1.75, "fused_gate": "interleaved", **SWIGLUOAI},
    "factors of gate": {"ranks": {"gate": 5}, "bias": False},
    "factors of up, concatenated": {"ranks": {"up": 5}, "fused_gate": "concatenated"},
    "factors of up, plain": {"ranks": {"up": 5}, "gated": False},
    "factors of down": {"ranks": {"down": 5}},
    "factors of gate and down": {"ranks": {"gate": 5, "down": 5}, "weights": None},
}
