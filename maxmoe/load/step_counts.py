"""Routed slots of each expert over the micro-batches of an optimizer step, for a balance loss over the whole step."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.named_collectives import all_reduce


class StepCounts:
    """Routed slots of each expert, and tokens, of the micro-batches of a step whose backward has run.

    Args:
        num_experts: E, number of experts of the layer.
        device: device of the layer.
        process_group: ranks with different tokens under DDP or FSDP; None for the default group.
    """

    def __init__(self, num_experts: int, device: torch.device, process_group: dist.ProcessGroup | None = None) -> None:
        # float64, in which counts are exact up to 2^53. The last element is the number of tokens.
        self._sums = torch.zeros(num_experts + 1, dtype=torch.float64, device=device)
        self._process_group = process_group

    def all_reduce(self, counts: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Sum counts ``(E,)`` and a number ``()`` of tokens over the ranks of a layer without a token group."""
        if not dist.is_initialized():
            return counts, num_tokens
        packed = torch.cat([counts, num_tokens.reshape(1)])
        all_reduce(packed, "counts of a step", group=self._process_group)
        return packed[:-1], packed[-1]

    def dot_frequencies(self, mass: Tensor, counts: Tensor, num_tokens: Tensor) -> Tensor:
        """Compute sum_e mass[e] * counts[e] / tokens, counted over the step so far and this micro-batch.

        The backward adds this micro-batch to the step. A recomputation by activation checkpointing has no backward of
        its own, so each micro-batch is added once. The backward reads the counts again: with a pipeline, the backward
        of other micro-batches has run since the forward, or since a recomputation of it.

        Args:
            mass: ``(E,)``, floating, sum of the probabilities, to which the gradient flows.
            counts: ``(E,)``, integer, routed slots of this micro-batch.
            num_tokens: ``()``, integer, tokens of this micro-batch.

        Returns:
            ``()``, dtype of mass.
        """
        own = torch.cat([counts.double(), num_tokens.double().reshape(1)])
        dot: Tensor = _dot_frequencies(mass, own, self._sums)
        return dot

    def reset(self) -> None:
        """Forget the micro-batches so far: the step has ended."""
        self._sums.zero_()


def _frequencies(own: Tensor, sums: Tensor) -> Tensor:
    total = own + sums
    return total[:-1] / total[-1].clamp_min(1)


# Operators, so that torch.compile keeps a backward that changes the counts in the graph.
@torch.library.custom_op("maxmoe::dot_frequencies", mutates_args=())
def _dot_frequencies(mass: Tensor, own: Tensor, sums: Tensor) -> Tensor:
    return (mass * _frequencies(own, sums).to(mass.dtype)).sum()


@torch.library.custom_op("maxmoe::dot_frequencies_backward", mutates_args=("sums",))
def _dot_frequencies_backward(gradient: Tensor, own: Tensor, sums: Tensor) -> Tensor:
    product = gradient * _frequencies(own, sums).to(gradient.dtype)
    sums += own
    return product


@_dot_frequencies.register_fake
def _(mass: Tensor, _own: Tensor, _sums: Tensor) -> Tensor:
    return mass.new_empty(())


@_dot_frequencies_backward.register_fake
def _(gradient: Tensor, own: Tensor, _sums: Tensor) -> Tensor:
    return gradient.new_empty(own.shape[0] - 1)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    _, own, sums = inputs
    ctx.save_for_backward(own)
    # Not a saved tensor: the backward reads the present value, and autograd would refuse a changed one.
    ctx.sums = sums


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (own,) = ctx.saved_tensors
    return _dot_frequencies_backward(gradient, own, ctx.sums), None, None


_dot_frequencies.register_autograd(_backward, setup_context=_keep)
