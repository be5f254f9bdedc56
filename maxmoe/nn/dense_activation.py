"""Activations of the experts in plain torch, for the dense implementation."""

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
    """Compute f(gate) * up; f(up) without a gate; f(gate) * (up + 1) for "swigluoai".

    With a limit, the gate is first clipped from above, and up on both sides.
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
