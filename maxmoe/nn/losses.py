"""Auxiliary losses of the routing, and what a layer computes of them."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from maxmoe import _C
from maxmoe.config import MoEConfig
from maxmoe.expert_load.stats import BoundedMoEStats, MoEStats
from maxmoe.expert_load.step_counts import StepCounts
from maxmoe.nn.routing import Routing
from maxmoe.nn.step_balance import step_balance_loss
from maxmoe.nn.windows import BufferUse
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


@dataclass(frozen=True)
class RoutingLosses:
    """Computes the auxiliary loss and the statistics of a layer.

    `balance_loss` is the loss of the scopes "sequence" and "batch".
    """

    # Whether the results of a forward without a backward are used outside of the layer, over all ranks.
    are_recorded: ClassVar[bool] = False

    config: MoEConfig
    balance_loss: BalanceLoss = load_balance_loss

    def __call__(
        self,
        routing: Routing,
        use: BufferUse,
        num_sequences: int,
        tokens: TokenReductions,
        step: StepCounts | None = None,
    ) -> tuple[Tensor, MoEStats]:
        """Compute the sum ``()`` of the weighted losses and the statistics over the tokens of all processes.

        `routing` and `num_sequences` are of this rank, `use` is of all processes. Without the counts of the
        step, the scope "step" has the balance loss of the scope "batch".
        """
        if routing.tokens_per_expert is not None and isinstance(tokens, LocalTokens) and step is None:
            entropy = router_entropy(routing.probabilities, max(routing.probabilities.shape[0], 1))
            has_loss = self.config.load_balance_loss_weight > 0 or self.config.router_z_loss_weight > 0
            aux_loss = self.aux_loss(routing, num_sequences) if has_loss else torch.zeros_like(entropy)
            return aux_loss, _stats(routing.tokens_per_expert, use.dropped, entropy, use)
        counts = self._tokens_per_expert(routing, num_sequences)
        aux_loss = self._weighted_losses(routing, counts, tokens, step)
        entropy = router_entropy(routing.probabilities)
        summands = (counts.sum(0), use.dropped, entropy, num_tokens_of(routing.probabilities, routing.token_mask))
        everywhere = FlattenedBatch(tokens)
        if routing.token_losses is None:
            load, dropped, entropy, num_tokens = everywhere.all_reduce_sequence(*summands)
        else:
            # In the collective of the statistics, so that such a loss adds none.
            total = routing.token_losses.sum()
            load, dropped, entropy, num_tokens, total = everywhere.all_reduce_sequence(*summands, total)
            aux_loss = aux_loss + mean_of(total, num_tokens)
        return aux_loss, _stats(load, dropped, mean_of(entropy, num_tokens), use)

    def aux_loss(self, routing: Routing, num_sequences: int) -> Tensor:
        """Compute the auxiliary loss ``()`` over the tokens of this process, for callers that read no statistics."""
        counts = self._tokens_per_expert(routing, num_sequences) if self.config.load_balance_loss_weight > 0 else None
        aux_loss = self._weighted_losses(routing, counts, LOCAL, None)
        if routing.token_losses is None:
            return aux_loss
        return aux_loss + mean_of(routing.token_losses.sum(), num_tokens_of(routing.probabilities, routing.token_mask))

    def _weighted_losses(
        self, routing: Routing, counts: Tensor | None, tokens: TokenReductions, step: StepCounts | None
    ) -> Tensor:
        aux_loss = routing.probabilities.new_zeros(())
        if self.config.load_balance_loss_weight > 0:
            assert counts is not None
            aux_loss = aux_loss + self._weighted_balance(routing, counts, tokens, step)
        if self.config.router_z_loss_weight > 0 and routing.logits is not None:
            z_loss = router_z_loss(routing.logits, token_mask=routing.token_mask, tokens=tokens)
            aux_loss = aux_loss + self.config.router_z_loss_weight * z_loss
        return aux_loss

    def _tokens_per_expert(self, routing: Routing, num_sequences: int) -> Tensor:
        """Count the routed slots ``(B, E)`` per sequence and expert."""
        slots = routing.experts.reshape(num_sequences, routing.experts.numel() // max(num_sequences, 1))
        counts = slots.new_zeros(num_sequences, self.config.num_selectable_experts)
        if routing.is_unpadded:
            return counts.scatter_add(1, slots, torch.ones_like(slots))
        return counts.scatter_add(1, slots.clamp_min(0), (slots >= 0).to(slots.dtype))

    def _weighted_balance(
        self, routing: Routing, counts: Tensor, tokens: TokenReductions, step: StepCounts | None
    ) -> Tensor:
        weight = self.config.load_balance_loss_weight
        if step is not None:
            num_tokens = torch.as_tensor(num_tokens_of(routing.probabilities, routing.token_mask), device=counts.device)
            top_k = self.config.top_k
            counts = counts.sum(0)
            return step_balance_loss(routing.probabilities, counts, top_k, num_tokens, step, weight, tokens=tokens)
        if self.config.load_balance_scope != "sequence":
            counts, tokens = counts.sum(0, keepdim=True), FlattenedBatch(tokens)
        num_sequences = counts.shape[0]
        length = routing.probabilities.shape[0] // max(num_sequences, 1)
        probabilities = routing.probabilities.view(num_sequences, length, self.config.num_selectable_experts)
        lengths = None if routing.token_mask is None else routing.token_mask.view(num_sequences, length).sum(1)
        loss = self.balance_loss(probabilities, counts, self.config.top_k, lengths=lengths, tokens=tokens)
        if not isinstance(loss, Tensor) or loss.shape != ():
            got = f"one of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"balance_loss must return a tensor of shape (), got {got}")
        return weight * loss


def router_entropy(probabilities: Tensor, divisor: int = 1) -> Tensor:
    """Return the sum ``()`` of -p log p, with 0 for p = 0, over a divisor; no gradient flows through it."""
    if not torch.compiler.is_compiling():
        return _C.router_entropy(probabilities, divisor)
    # A compiler fuses these. torch.special.entr computes the same, but is not vectorized.
    p = probabilities.detach()
    return (p.clamp_min(torch.finfo(p.dtype).tiny).log() * p).sum().neg() / divisor


def num_tokens_of(rows: Tensor, token_mask: Tensor | None) -> Tensor | int:
    """Return the number of rows without padding."""
    return rows.shape[0] if token_mask is None else token_mask.sum()


def mean_of(total: Tensor, count: Tensor | int) -> Tensor:
    """Divide a total by a count of at least one, in the dtype of the total."""
    if isinstance(count, Tensor):
        return total / count.clamp_min(1).to(total.dtype)
    return total / max(count, 1)


def _stats(load: Tensor, dropped: Tensor, entropy: Tensor, use: BufferUse) -> Any:
    """Return `MoEStats`, or `BoundedMoEStats` if a buffer has windows."""
    if use.required_factor is None or use.overflowed is None:
        return MoEStats(load, dropped, entropy)
    return BoundedMoEStats(load, dropped, entropy, use.required_factor, use.overflowed)
