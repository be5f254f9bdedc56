"""What a layer adds to the backward beside the gradient of its output."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxmoe._torch import reshaped
from maxmoe.nn.losses import MoEStats


class _WithGradient(torch.autograd.Function):
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
    """Return x, and give `target` a gradient when the backward passes here.

    It passes once for every forward that takes part in the loss, however often activation checkpointing computes it.

    Args:
        x: any tensor that requires a gradient; its own is not changed.
        target: any tensor that requires a gradient.
        gradient: of `target`, shape and dtype of it.

    Returns:
        x; like the output of any operator, it may be changed in place.
    """
    # PyTorch makes a view of an input that a Function returns, and forbids to change it in place.
    attached = _WithGradient.apply(x, target, gradient)  # type: ignore[no-untyped-call]
    return reshaped(attached, x.shape)


class AccumulatedMetrics(NamedTuple):
    """What `MetricsAccumulator` has added up.

    Attributes:
        calls: ``()``, float64; forwards that the backward has passed.
        aux_loss: ``()``, float64.
        stats: counts and entropy, both summed.
    """

    calls: Tensor
    aux_loss: Tensor
    stats: MoEStats


class MetricsAccumulator:
    """Adds up the auxiliary losses and statistics of one layer in the backward: they accumulate as a gradient.

    Args:
        num_experts: E.
        device: of the sum.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        # Counts are exact in float64 up to 2^53.
        self._leaf = torch.zeros(num_experts + 4, dtype=torch.float64, device=device, requires_grad=True)

    def add(self, hidden_states: Tensor, aux_loss: Tensor, stats: MoEStats) -> Tensor:
        """Add, when the backward passes `hidden_states`.

        Args:
            hidden_states: of the layer, whose gradient is not changed.
            aux_loss: ``()``.
            stats: of the same forward.

        Returns:
            `hidden_states`.
        """
        if not hidden_states.requires_grad:
            return hidden_states
        scalars = (torch.ones_like(aux_loss), aux_loss.detach(), stats.dropped, stats.router_entropy)
        packed = torch.cat([torch.stack([scalar.double() for scalar in scalars]), stats.tokens_per_expert.double()])
        return with_gradient(hidden_states, self._leaf, packed)

    def take(self) -> Tensor:
        """Return the sum, packed, and begin at zero again."""
        total, self._leaf.grad = self._leaf.grad, None
        return torch.zeros_like(self._leaf, requires_grad=False) if total is None else total

    @staticmethod
    def unpack(packed: Tensor) -> AccumulatedMetrics:
        """Return the parts of a packed sum.

        Args:
            packed: from `take`; may be a sum over ranks.

        Returns:
            The parts.
        """
        calls, aux_loss, dropped, entropy = packed[:4].unbind()
        return AccumulatedMetrics(calls, aux_loss, MoEStats(packed[4:].long(), dropped.long(), entropy))
