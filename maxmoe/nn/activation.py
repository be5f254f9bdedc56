"""The experts' activations in plain torch, for the dense implementation."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from maxmoe.config import Activation

_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "swigluoai": lambda x: x * torch.sigmoid(1.702 * x),
}


def activate(gate: Tensor | None, up: Tensor, activation: Activation, limit: float | None) -> Tensor:
    """Apply an activation.

    f(gate) * up;  f(up) without a gate;  f(gate) * (up + 1) for "swigluoai"

    Args:
        gate: pre-activation of the gate, clipped from above by `limit`, or None.
        up: pre-activation, shape and dtype of gate, clipped on both sides by `limit`.
        activation: names f.
        limit: None for no clipping.

    Returns:
        Shape and dtype of up.
    """
    function = _FUNCTIONS[activation]
    if gate is None:
        return function(up)
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    if activation == "swigluoai":
        up = up + 1
    return function(gate) * up
