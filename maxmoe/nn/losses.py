"""Auxiliary losses of the routing."""

from typing import Protocol

import torch
from torch import Tensor

from maxmoe.expert_load.step_counts import StepCounts
from maxmoe.ranks.token_group import FlattenedBatch, LocalTokens, TokenReductions

LOCAL = LocalTokens()


def load_balance_loss(
    probabilities: Tensor,
    tokens_per_expert: Tensor,
    top_k: int,
    *,
    lengths: Tensor | None = None,
    tokens: TokenReductions = LOCAL,
) -> Tensor:
    """Compute the load balance loss, which is 1 if the tokens are spread evenly over the experts.

    mean_b sum_e f[b, e] * sum_s(probabilities[b, s, e]) / S[b],   f[b, e] = E / (K S[b]) * tokens_per_expert[b, e]

    The probabilities of `maxmoe.ops.route` have a sum of 1, and below it for tiny scores: the scores are divided by
    their sum + 1e-20, as in DeepSeek-V3. The probabilities of a token have a sum above 0.99 while one of its logits is
    above -41 ("sigmoid") or -82 ("sqrtsoftplus").

    Args:
        probabilities: ``(B, S, E)``, floating, routing probabilities, zero for padding. The gradient flows to them.
        tokens_per_expert: ``(B, E)``, integer, number of routed slots.
        top_k: K, experts per token.
        lengths: ``(B,)``, integer, number of tokens of each sequence without padding; None for S. The mean over the
            sequences leaves out empty ones.
        tokens: reductions over the processes that share the tokens; B and S are reduced as well.

    Returns:
        ``()``, dtype of probabilities, the loss; 0 without tokens.

    Source: DeepSeek-V3 (arXiv:2412.19437) equations 17-20; Switch Transformer (arXiv:2101.03961).
    """
    num_sequences, length, num_experts = probabilities.shape
    if lengths is None:
        lengths = tokens_per_expert.new_full((num_sequences,), length)
    lengths, counts, mass = tokens.all_reduce_sequence(lengths, tokens_per_expert, probabilities.sum(1))
    # Cast first, because torch divides integers in the default dtype, not in the dtype of the probabilities.
    divisors = lengths.clamp_min(1).to(mass.dtype).unsqueeze(1)
    frequencies = counts.to(mass.dtype) * (num_experts / top_k) / divisors
    loss, count = tokens.all_reduce_batch((frequencies * mass / divisors).sum(), (lengths > 0).sum())
    return mean_of(loss, count)


class BalanceLoss(Protocol):
    """Signature of balance losses, such as `load_balance_loss`.

    A custom balance loss has the same arguments and returns a tensor ``()``. On a mesh it must be the loss over
    the tokens of all processes, from sums that `tokens` reduces. The layer multiplies it by `load_balance_loss_weight`.
    """

    def __call__(
        self,
        probabilities: Tensor,
        tokens_per_expert: Tensor,
        top_k: int,
        *,
        lengths: Tensor | None,
        tokens: TokenReductions,
    ) -> Tensor:
        """Compute the loss."""
        ...


def checked_balance_loss(loss: Tensor) -> Tensor:
    """Return the result of a balance loss; raises for one that is no scalar."""
    if not isinstance(loss, Tensor) or loss.shape != ():
        got = f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"balance_loss must return a tensor of shape (), got {got}")
    return loss


def step_balance_loss(
    probabilities: Tensor,
    tokens_per_expert: Tensor,
    top_k: int,
    num_tokens: Tensor,
    step: StepCounts,
    weight: float,
    *,
    tokens: TokenReductions = LOCAL,
) -> Tensor:
    """Compute the weighted balance loss with the load of the optimizer step so far.

    weight * sum_e f[e] * sum_t(probabilities[t, e]) / T,   f[e] = E / (K T') * tokens_per_expert'[e]

    T tokens of this micro-batch; T' tokens and tokens_per_expert' slots of this micro-batch and of all whose backward
    has run since the step began. The loss counts each micro-batch once, when its backward runs.

    Args:
        probabilities: ``(T, E)``, floating, routing probabilities, zero for padding. The gradient flows to them.
        tokens_per_expert: ``(E,)``, integer, number of routed slots.
        top_k: K, experts per token.
        num_tokens: ``()``, integer, number of tokens without padding.
        step: counts of the step.
        weight: weight of the loss.
        tokens: reductions over the processes that share the tokens.

    Returns:
        ``()``, dtype of probabilities, the loss.

    Source: Qiu et al. (arXiv:2501.11873), section 3.
    """
    counts, num_tokens, mass = FlattenedBatch(tokens).all_reduce_sequence(
        tokens_per_expert, num_tokens, probabilities.sum(0)
    )
    local_tokens = num_tokens
    if isinstance(tokens, LocalTokens):
        counts, num_tokens = step.all_reduce(counts, num_tokens)
    # Scaled first, so that the sum is the loss that `step` reports.
    scale = weight * probabilities.shape[1] / top_k
    return step.dot_frequencies(mean_of(mass * scale, local_tokens), counts, num_tokens)


def router_z_loss(logits: Tensor, *, token_mask: Tensor | None = None, tokens: TokenReductions = LOCAL) -> Tensor:
    """Compute the router z-loss, which keeps the logits small.

    mean_t logsumexp(logits[t])^2

    Args:
        logits: ``(T, E)``, floating, logits of the router.
        token_mask: ``(T,)``, bool, False for padding.
        tokens: reductions over the processes that share the tokens; T is reduced as well.

    Returns:
        ``()``, dtype of logits, the loss; 0 without tokens.

    Source: ST-MoE (arXiv:2202.08906) equation 5.
    """
    squares = logits.logsumexp(-1).square()
    if token_mask is not None:
        squares = squares.masked_fill(~token_mask, 0.0)
    total, num_tokens = FlattenedBatch(tokens).all_reduce_sequence(squares.sum(), num_tokens_of(logits, token_mask))
    return mean_of(total, num_tokens)


def mean_over_tokens(
    token_losses: Tensor,
    token_mask: Tensor | None = None,
    *,
    num_tokens: Tensor | None = None,
    tokens: TokenReductions = LOCAL,
) -> Tensor:
    """Compute the mean of a loss over the tokens of all ranks.

    sum over all ranks of token_losses[token_mask] / num_tokens

    The value is global. The gradient on each rank is the gradient of its own tokens, as `maxmoe.parallelize` expects.

    Args:
        token_losses: ``(...)``, floating, one loss per token of this rank.
        token_mask: ``(...)``, bool, False for tokens to leave out.
        num_tokens: ``()``, divisor; None for the number of tokens on all ranks. With gradient accumulation, pass
            `count_tokens` of all micro-batches: the losses of the micro-batches then add up to the mean.
        tokens: reductions over the ranks, from `maxmoe.parallel.token_group`; not needed in one process.

    Returns:
        ``()``, float32 or wider, mean loss, equal on all ranks; 0 without tokens.

    Raises:
        ValueError: for a mask that is not bool or has another shape.
        TypeError: if `tokens` has no reductions.
    """
    if token_mask is not None:
        if token_mask.dtype != torch.bool or token_mask.shape != token_losses.shape:
            raise ValueError(
                f"token_mask must be bool of shape {tuple(token_losses.shape)}, "
                f"got {token_mask.dtype} of shape {tuple(token_mask.shape)}"
            )
        token_losses = token_losses.masked_fill(~token_mask, 0.0)
    total = token_losses.to(torch.promote_types(token_losses.dtype, torch.float32)).sum()
    if not hasattr(tokens, "all_reduce_batch"):
        raise TypeError(f"tokens must be maxmoe.parallel.token_group(mesh, rules), got {type(tokens).__name__}")
    everywhere = FlattenedBatch(tokens)
    if num_tokens is None:
        local = token_losses.numel() if token_mask is None else token_mask.sum()
        total, num_tokens = everywhere.all_reduce_sequence(total, local)
    else:
        (total,) = everywhere.all_reduce_sequence(total)
    return mean_of(total, num_tokens)


def count_tokens(token_mask: Tensor, *, tokens: TokenReductions = LOCAL) -> Tensor:
    """Count the tokens of all ranks.

    Args:
        token_mask: ``(...)``, bool, mask of this rank's batch, or of all micro-batches of an optimizer step.
        tokens: reductions over the ranks, as in `mean_over_tokens`.

    Returns:
        ``()``, int64, number of True values on all ranks.
    """
    count: Tensor
    (count,) = FlattenedBatch(tokens).all_reduce_sequence(token_mask.sum())
    return count


def num_tokens_of(rows: Tensor, token_mask: Tensor | None) -> Tensor | int:
    """Return the number of rows without padding."""
    return rows.shape[0] if token_mask is None else token_mask.sum()


def mean_of(total: Tensor, count: Tensor | int) -> Tensor:
    """Divide a total by a count of at least one, in the dtype of the total."""
    if isinstance(count, Tensor):
        return total / count.clamp_min(1).to(total.dtype)
    return total / max(count, 1)
