"""Activations of the experts in plain torch, for the dense implementation."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from maxmoe.config import Activation
from maxmoe.ops import ActivationFunction
from maxmoe.ops.expert_ffn import activate_with

_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "swigluoai": lambda x: x * torch.sigmoid(1.702 * x),
}


def activate(
    gate: Tensor | None, up: Tensor, activation: Activation | ActivationFunction, limit: float | None
) -> Tensor:
    """Compute f(gate) * up; f(up) without a gate; f(gate) * (up + 1) for "swigluoai"; or a function of gate and up.

    With a limit, the gate is first clipped from above, and up on both sides.
    """
    if callable(activation):
        return activate_with(activation, gate, up)
    function = _FUNCTIONS[activation]
    if gate is None:
        return function(up)
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    if activation == "swigluoai":
        up = up + 1
    return function(gate) * up


def check_activation_is_known(activation: Activation | ActivationFunction) -> None:
    """Raise for a function, of which only autograd knows what it saves."""
    if callable(activation):
        raise ValueError("the tensors that a custom activation saves are not known: plan with a named activation")
