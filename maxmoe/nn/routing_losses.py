"""Auxiliary loss and statistics of a layer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from maxmoe.config import MoEConfig
from maxmoe.declaration import TOKEN_DIMS, SavedTensor
from maxmoe.expert_load.stats import MoEStats
from maxmoe.expert_load.step_counts import StepCounts
from maxmoe.nn.losses import (
    LOCAL,
    BalanceLoss,
    checked_balance_loss,
    load_balance_loss,
    mean_of,
    num_tokens_of,
    router_z_loss,
    step_balance_loss,
)
from maxmoe.nn.routing import Routing
from maxmoe.ranks.token_group import FlattenedBatch, TokenReductions


def _entropy(probabilities: Tensor) -> Tensor:
    """Sum -p log p, with 0 for p = 0. torch.special.entr computes the same, but is not vectorized."""
    logarithms = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log_()
    return logarithms.mul_(probabilities).sum().neg()


@dataclass(frozen=True)
class RoutingLosses:
    """Computes the auxiliary loss and the statistics of a layer.

    Args:
        config: config of the layer.
        balance_loss: balance loss of the scopes "sequence" and "batch".

    Attributes:
        are_recorded: whether the results of a forward without a backward are used outside of the layer, over all ranks.
    """

    are_recorded: ClassVar[bool] = False

    config: MoEConfig
    balance_loss: BalanceLoss = load_balance_loss

    def __call__(
        self,
        routing: Routing,
        dropped: Tensor,
        num_sequences: int,
        tokens: TokenReductions,
        step: StepCounts | None = None,
    ) -> tuple[Tensor, MoEStats]:
        """Compute the sum ``()`` of the weighted losses and the statistics over the tokens of all processes.

        Args:
            routing: routing of this rank's tokens.
            dropped: ``()``, number of dropped slots over all processes.
            num_sequences: number of sequences of this rank.
            tokens: reductions over the processes that share the tokens.
            step: counts of the step for the balance loss of the scope "step"; None for that of the scope "batch".
        """
        counts = self._tokens_per_expert(routing, num_sequences)
        aux_loss = self._weighted_losses(routing, counts, tokens, step)
        entropy = _entropy(routing.probabilities.detach())
        summands = (counts.sum(0), dropped, entropy, num_tokens_of(routing.probabilities, routing.token_mask))
        everywhere = FlattenedBatch(tokens)
        if routing.token_losses is None:
            load, dropped, entropy, num_tokens = everywhere.all_reduce_sequence(*summands)
        else:
            # In the collective of the statistics, so that such a loss adds none.
            total = routing.token_losses.sum()
            load, dropped, entropy, num_tokens, total = everywhere.all_reduce_sequence(*summands, total)
            aux_loss = aux_loss + mean_of(total, num_tokens)
        return aux_loss, MoEStats(load, dropped, mean_of(entropy, num_tokens))

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
        return weight * checked_balance_loss(loss)

    def saved_tensors(self, batch: int, length: int, wide: torch.dtype) -> dict[str, SavedTensor]:
        """Describe the tensors that the losses save, given the dtype of the probabilities."""
        config = self.config
        saved: dict[str, SavedTensor] = {}
        if config.router_z_loss_weight > 0:
            saved["logsumexp"] = SavedTensor((batch, length), TOKEN_DIMS, wide)
        if config.load_balance_loss_weight > 0 and config.load_balance_scope == "step":
            saved["step_counts"] = SavedTensor((config.num_selectable_experts + 1,), (None,), torch.float64)
            saved["mass"] = SavedTensor((config.num_selectable_experts,), (None,), wide)
            saved.update(dict.fromkeys(("num_tokens", "loss"), SavedTensor((), (), wide)))
        elif config.load_balance_loss_weight > 0:
            rows, name = (batch, TOKEN_DIMS[0]) if config.load_balance_scope == "sequence" else (1, None)
            saved["frequencies"] = SavedTensor((rows, config.num_selectable_experts), (name, None), wide)
            saved["lengths"] = SavedTensor((rows,), (name,), wide)
            saved["num_sequences"] = SavedTensor((), (), wide)
        return saved
