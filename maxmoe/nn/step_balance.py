"""The balance loss with the load of an optimizer step: an operator whose backward adds a micro-batch to the step."""

import threading
from typing import Any

import torch
from torch import Tensor

from maxmoe.expert_load.step_counts import StepCounts


def dot_frequencies(mass: Tensor, counts: Tensor, num_tokens: Tensor, step: StepCounts) -> Tensor:
    """Compute sum_e mass[e] * counts[e] / tokens, with the counts of the step so far and of this micro-batch.

    The backward adds this micro-batch to the step. A recomputation by activation checkpointing has no backward of its
    own, so each micro-batch is added once. The backward reads the counts again: with a pipeline, the backward of other
    micro-batches has run since the forward, or since a recomputation of it. ``step.late`` has how much the value has
    changed since then.

    Args:
        mass: ``(E,)``, floating, sum of the probabilities times a factor, to which the gradient flows.
        counts: ``(E,)``, integer, routed slots of this micro-batch.
        num_tokens: ``()``, integer, tokens of this micro-batch.
        step: counts of the step.

    Returns:
        ``()``, dtype of mass.
    """
    own = torch.cat([counts.double(), num_tokens.double().reshape(1)])
    dot: Tensor = _dot_frequencies(mass, own, step.sums, step.late)
    return dot


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


_dot_frequencies.register_fake(lambda mass, *_others: mass.new_empty(()))
_dot_frequencies_backward.register_fake(lambda _gradient, mass, *_others: torch.empty_like(mass))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    mass, own, *sums = inputs
    ctx.save_for_backward(mass, own, output)
    # Not saved tensors: the backward reads the present values, and autograd would refuse changed ones.
    ctx.sums = sums


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return _dot_frequencies_backward(gradient, *ctx.saved_tensors, *ctx.sums), None, None, None


_dot_frequencies.register_autograd(_backward, setup_context=_keep)
