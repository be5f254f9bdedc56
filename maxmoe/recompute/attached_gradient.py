"""A gradient that the backward adds once for each forward, however often the forward is recomputed."""

from typing import Any

import torch
from torch import Tensor

from maxmoe._torch import reshaped


class _WithGradient(torch.autograd.Function):
    # Identity for x. The backward returns the saved tensor as the gradient of the second input, the target.
    @staticmethod
    def forward(x: Tensor, _target: Tensor, _gradient: Tensor) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return *gradients, gradient, None


def with_gradient(x: Tensor, target: Tensor, gradient: Tensor) -> Tensor:
    """Return x and attach `gradient` to it: the backward through x adds `gradient` to the gradient of `target`.

    The backward through x runs once for each forward that contributes to the loss, no matter how often activation
    checkpointing recomputes the forward. The gradient of x is unchanged.
    """
    # PyTorch returns a view of an input that a Function returns unchanged, and forbids in-place operators on it.
    attached = _WithGradient.apply(x, target, gradient)  # type: ignore[no-untyped-call]
    return reshaped(attached, x.shape)
