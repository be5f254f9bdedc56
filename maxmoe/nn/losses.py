"""Losses and statistics of the routing."""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple

from maxmoe.config import MoEConfig
from maxmoe.nn.router import Routing
from maxmoe.nn.tokens import BatchAsSequence, LocalTokens, TokenReductions

LOCAL = LocalTokens()
Number = TypeVar("Number", int, Tensor)


class MoEStats(NamedTuple):
    """What one call of the layer did, as tensors: reading them is the caller's synchronisation.

    Attributes:
        tokens_per_expert: ``(E,)``, int64; routed slots of each expert, those dropped later included.
        dropped: ``()``, int64; slots that capacity_factor or buffer_factor left out.
        router_entropy: ``()``; mean entropy of the normalised scores in nats, log(E) at most.
    """

    tokens_per_expert: Tensor
    dropped: Tensor
    router_entropy: Tensor

    @property
    def load_max_over_mean(self) -> Tensor:
        """Load of the busiest expert over the mean load: 1 in perfect balance, E at worst."""
        load = self.tokens_per_expert.to(torch.float32)
        return load.max() / load.mean().clamp_min(1e-20)

    @property
    def dead_expert_fraction(self) -> Tensor:
        """Share of the experts that got no token."""
        return (self.tokens_per_expert == 0).to(torch.float32).mean()

    def __repr__(self) -> str:
        shown = (*self._fields, "load_max_over_mean", "dead_expert_fraction")
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


# torch.export.save writes this name, and needs one.
_register_namedtuple(MoEStats, serialized_type_name="maxmoe.MoEStats")


def load_balance_loss(
    probabilities: Tensor, tokens_per_expert: Tensor, top_k: int, *, tokens: TokenReductions = LOCAL
) -> Tensor:
    """Loss that is 1 for tokens spread evenly over the experts and grows with imbalance.

    mean_b sum_e f[b, e] * mean_s(probabilities[b, s, e]),   f[b, e] = E / (K S) * tokens_per_expert[b, e]

    Args:
        probabilities: ``(B, S, E)``, floating; carries the gradient.
        tokens_per_expert: ``(B, E)``, integer counts of the routed slots.
        top_k: K.
        tokens: reductions over the processes that share the tokens; B and S are reduced too.

    Returns:
        ``()``, dtype of probabilities; 0 for no tokens.

    Source: DeepSeek-V3 (arXiv:2412.19437) equations 17-20; Switch Transformer (arXiv:2101.03961).
    """
    num_sequences, length, num_experts = probabilities.shape
    length, counts, mass = tokens.all_reduce_sequence(length, tokens_per_expert, probabilities.sum(1))
    length = at_least_one(length)
    frequencies = counts.to(probabilities.dtype) * (num_experts / (top_k * length))
    loss, num_sequences = tokens.all_reduce_batch((frequencies * mass / length).sum(), num_sequences)
    return loss / at_least_one(num_sequences)


def router_z_loss(logits: Tensor, *, tokens: TokenReductions = LOCAL) -> Tensor:
    """Loss that keeps the logits small.

    mean_t logsumexp(logits[t])^2

    Args:
        logits: ``(T, E)``, floating.
        tokens: reductions over the processes that share the tokens; T is reduced too.

    Returns:
        ``()``, dtype of logits; 0 for no tokens.

    Source: ST-MoE (arXiv:2202.08906) equation 5.
    """
    squares = logits.logsumexp(-1).square()
    total, num_tokens = BatchAsSequence(tokens).all_reduce_sequence(squares.sum(), squares.shape[0])
    return total / at_least_one(num_tokens)


def at_least_one(count: Number) -> Number:
    """Return a count to divide by."""
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


@dataclass(frozen=True)
class RoutingLosses:
    """The weighted losses of a layer's config, and its statistics."""

    config: MoEConfig

    def __call__(
        self, routing: Routing, dropped: Tensor, num_sequences: int, tokens: TokenReductions
    ) -> tuple[Tensor, MoEStats]:
        """Compute them over all tokens of all processes.

        Args:
            routing: of this process's tokens.
            dropped: ``()``, int64; slots that this process left out.
            num_sequences: B, of this process.
            tokens: reductions over the processes that share the tokens.

        Returns:
            ``()``, the sum of the weighted losses, and the statistics; the same in all processes.
        """
        counts = self._tokens_per_expert(routing.experts, num_sequences)
        aux_loss = routing.logits.new_zeros(())
        if self.config.load_balance_loss_weight > 0:
            aux_loss = aux_loss + self.config.load_balance_loss_weight * self._balance(routing, counts, tokens)
        if self.config.router_z_loss_weight > 0:
            aux_loss = aux_loss + self.config.router_z_loss_weight * router_z_loss(routing.logits, tokens=tokens)

        entropy = torch.special.entr(routing.probabilities.detach()).sum()
        load, dropped, entropy, num_tokens = BatchAsSequence(tokens).all_reduce_sequence(
            counts.sum(0), dropped, entropy, routing.logits.shape[0]
        )
        return aux_loss, MoEStats(load, dropped, entropy / at_least_one(num_tokens))

    def _tokens_per_expert(self, experts: Tensor, num_sequences: int) -> Tensor:
        """Count the slots of each sequence and expert: ``(B, E)``."""
        slots = experts.reshape(num_sequences, experts.numel() // max(num_sequences, 1))
        counts = slots.new_zeros(num_sequences, self.config.num_experts)
        return counts.scatter_add(1, slots, torch.ones_like(slots))

    def _balance(self, routing: Routing, counts: Tensor, tokens: TokenReductions) -> Tensor:
        if self.config.load_balance_scope == "batch":
            counts, tokens = counts.sum(0, keepdim=True), BatchAsSequence(tokens)
        num_sequences = counts.shape[0]
        length = routing.probabilities.shape[0] // max(num_sequences, 1)
        probabilities = routing.probabilities.view(num_sequences, length, self.config.num_experts)
        return load_balance_loss(probabilities, counts, self.config.top_k, tokens=tokens)
