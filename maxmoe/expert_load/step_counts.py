"""Routed slots of each expert over the micro-batches of an optimizer step, for a balance loss over the whole step."""

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.ranks.named_collectives import all_reduce


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
        # Sum of the values in the backward, less those in the forward.
        self._late = torch.zeros((), dtype=torch.float64, device=device)
        self._process_group = process_group

    def all_reduce(self, counts: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Sum counts ``(E,)`` and a number ``()`` of tokens over the ranks of a layer without a token group."""
        if not dist.is_initialized():
            return counts, num_tokens
        packed = torch.cat([counts, num_tokens.reshape(1)])
        all_reduce(packed, "counts of a step", group=self._process_group)
        return packed[:-1], packed[-1]

    def dot_frequencies(self, mass: Tensor, counts: Tensor, num_tokens: Tensor) -> Tensor:
        """Compute sum_e mass[e] * counts[e] / tokens, with the counts of the step so far and of this micro-batch.

        The backward adds this micro-batch to the step. A recomputation by activation checkpointing has no backward of
        its own, so each micro-batch is added once. The backward reads the counts again: with a pipeline, the backward
        of other micro-batches has run since the forward, or since a recomputation of it. `take` returns how much the
        value has changed since then.

        Args:
            mass: ``(E,)``, floating, sum of the probabilities times a factor, to which the gradient flows.
            counts: ``(E,)``, integer, routed slots of this micro-batch.
            num_tokens: ``()``, integer, tokens of this micro-batch.

        Returns:
            ``()``, dtype of mass.
        """
        own = torch.cat([counts.double(), num_tokens.double().reshape(1)])
        dot: Tensor = _dot_frequencies(mass, own, self._sums, self._late)
        return dot

    def take(self) -> Tensor:
        """Reset the counts, and return ``()``, float64, how much their losses changed until their backward.

        Added to the sum of the losses of the forwards, it gives the sum of the losses whose gradients were taken.
        """
        late = self._late.clone()
        self._late.zero_()
        self._sums.zero_()
        return late


def _dot(mass: Tensor, own: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum ``()`` and the frequencies ``(E,)``."""
    total = own + sums
    frequencies = (total[:-1] / total[-1].clamp_min(1)).to(mass.dtype)
    return (mass * frequencies).sum(), frequencies


_additions = threading.Lock()  # of backwards in several threads


# Operators, so that torch.compile keeps a backward that changes the counts in the graph.
@torch.library.custom_op("maxmoe::dot_frequencies", mutates_args=())
def _dot_frequencies(mass: Tensor, own: Tensor, sums: Tensor, late: Tensor) -> Tensor:
    return _dot(mass, own, sums)[0]


@torch.library.custom_op("maxmoe::dot_frequencies_backward", mutates_args=("sums", "late"))
def _dot_frequencies_backward(
    gradient: Tensor, mass: Tensor, own: Tensor, dot: Tensor, sums: Tensor, late: Tensor
) -> Tensor:
    with _additions:
        now, frequencies = _dot(mass, own, sums)
        sums += own
        late += now - dot
    return gradient * frequencies


@_dot_frequencies.register_fake
def _(mass: Tensor, _own: Tensor, _sums: Tensor, _late: Tensor) -> Tensor:
    return mass.new_empty(())


@_dot_frequencies_backward.register_fake
def _(_gradient: Tensor, mass: Tensor, _own: Tensor, _dot: Tensor, _sums: Tensor, _late: Tensor) -> Tensor:
    return torch.empty_like(mass)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    mass, own, *sums = inputs
    ctx.save_for_backward(mass, own, output)
    # Not saved tensors: the backward reads the present values, and autograd would refuse changed ones.
    ctx.sums = sums


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return _dot_frequencies_backward(gradient, *ctx.saved_tensors, *ctx.sums), None, None, None


_dot_frequencies.register_autograd(_backward, setup_context=_keep)
