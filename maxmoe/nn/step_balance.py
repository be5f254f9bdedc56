"""The balance loss with the load of an optimizer step, whose backward adds a micro-batch to the step."""

import threading
from typing import Any

import torch
from torch import Tensor

from maxmoe.expert_load.step_counts import StepCounts
from maxmoe.ranks.token_group import FlattenedBatch, LocalTokens, TokenReductions


def step_balance_loss(
    probabilities: Tensor,
    tokens_per_expert: Tensor,
    top_k: int,
    num_tokens: Tensor,
    step: StepCounts,
    weight: float,
    *,
    tokens: TokenReductions,
) -> Tensor:
    """Compute the weighted balance loss with the load of the optimizer step so far.

    weight * sum_e f[e] * sum_t(probabilities[t, e]) / T,   f[e] = E / (K T') * tokens_per_expert'[e]

    T tokens of this micro-batch; T' tokens and tokens_per_expert' slots of this micro-batch and of all whose backward
    has run since the step began. The backward adds this micro-batch to the step. A recomputation by activation
    checkpointing has no backward of its own, so each micro-batch is added once. The backward reads the counts again:
    with a pipeline, the backward of other micro-batches has run since the forward, or since a recomputation of it.
    ``step.late`` has how much the value has changed since then.

    Source: Qiu et al. (arXiv:2501.11873), section 3.
    """
    counts, num_tokens, mass = FlattenedBatch(tokens).all_reduce_sequence(
        tokens_per_expert, num_tokens, probabilities.sum(0)
    )
    divisor = num_tokens.clamp_min(1).to(mass.dtype)
    if isinstance(tokens, LocalTokens):
        counts, num_tokens = step.all_reduce(counts, num_tokens)
    own = torch.cat([counts.double(), num_tokens.double().reshape(1)])
    # Scaled first, so that the sum is the loss that `step` reports.
    scale = weight * probabilities.shape[1] / top_k
    loss: Tensor = _dot_frequencies(mass * scale / divisor, own, step.sums, step.late)
    return loss


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
