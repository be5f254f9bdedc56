"""Result of a router: the experts of each token, their weights, and what the losses read."""

from typing import NamedTuple

import torch
from torch import Tensor


class TopK(NamedTuple):
    """Expert ids and routing weights of tokens.

    Attributes:
        weights: ``(T, K)``, float32 or wider, routing weights; 0 where `experts` is -1.
        experts: ``(T, K)``, int64, expert ids; -1 for a slot that is not routed.
        is_unpadded: whether all slots are known to be routed, so that their number is known without reading `experts`.
    """

    weights: Tensor
    experts: Tensor
    is_unpadded: bool = False

    def tensor_split(self, sections: int) -> list["TopK"]:
        """Split along the tokens, as `torch.tensor_split` does."""
        parts = zip(self.weights.tensor_split(sections), self.experts.tensor_split(sections), strict=True)
        return [TopK(weights, experts, self.is_unpadded) for weights, experts in parts]


class Routing(NamedTuple):
    """Output of a router.

    Attributes:
        logits: ``(T, E)``, float32 or wider, logits of all experts, for the router z-loss; None if the router has none.
        probabilities: ``(T, E)``, float32 or wider, share of each expert in a token, for the balance loss and the
            entropy; 0 for padding.
        weights: ``(T, K)``, float32 or wider, routing weights; 0 where `experts` is -1.
        experts: ``(T, K)``, int64, expert ids; -1 for a slot that is not routed.
        token_mask: ``(T,)``, bool, False for padding; None for no padding.
        is_unpadded: whether all slots are known to be routed, so that their number is known without reading `experts`.
        token_losses: ``(T,)``, float32 or wider, loss of each token, 0 for padding, whose mean is added to the
            auxiliary loss; None for no such loss.
    """

    logits: Tensor | None
    probabilities: Tensor
    weights: Tensor
    experts: Tensor
    token_mask: Tensor | None = None
    is_unpadded: bool = True
    token_losses: Tensor | None = None

    @classmethod
    def of(
        cls,
        *,
        experts: Tensor,
        weights: Tensor,
        probabilities: Tensor,
        logits: Tensor | None = None,
        token_losses: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> "Routing":
        """Make the result of a custom router.

        The leading dims ``(...)`` are those of the input of the router, usually ``(B, S)``. Padding is removed: its
        slots become -1, its weights, probabilities and losses 0.

        Args:
            experts: ``(..., K)``, int64, the `top_k` expert ids of each token in any order; -1 for an unused slot.
            weights: ``(..., K)``, floating, routing weights, through which the router is trained.
            probabilities: ``(..., E)``, floating, share of each expert in a token, for the balance loss and the
                entropy. The rows usually have the sum 1.
            logits: ``(..., E)``, floating, logits, for the router z-loss.
            token_losses: ``(...)``, floating, a loss of each token, such as a sparsity loss. The mean over the tokens
                of all ranks is added to the auxiliary loss.
            token_mask: the mask that the router was called with.

        Returns:
            Routing with float32 or wider values and the tokens in one dim.

        Raises:
            ValueError: if the leading dims differ from the leading dims of `experts`. The layer checks the rest.
        """
        leading = experts.shape[:-1]
        of_tokens = {"weights": weights, "probabilities": probabilities, "logits": logits}
        found = {name: part.shape[:-1] for name, part in of_tokens.items() if part is not None}
        for name, dims in {**found, "token_losses": leading if token_losses is None else token_losses.shape}.items():
            if dims != leading:
                raise ValueError(f"{name} must have the leading dims of experts {(*leading,)}, got {(*dims,)}")
        experts = experts.flatten(0, -2)
        routing = cls(
            None if logits is None else _wide(logits.flatten(0, -2)),
            _wide(probabilities.flatten(0, -2)),
            _wide(weights.flatten(0, -2)).masked_fill(experts < 0, 0.0),
            experts,
            is_unpadded=False,
            token_losses=None if token_losses is None else _wide(token_losses.flatten()),
        )
        return routing if token_mask is None else routing.without_padding(token_mask)

    def without_padding(self, token_mask: Tensor) -> "Routing":
        """Remove padding, so that it is not routed and contributes to no loss.

        Args:
            token_mask: ``(T,)``, bool, False for padding.

        Returns:
            Routing in which padding has the expert ids -1, and weights, probabilities and losses of 0.
        """
        is_padding = ~token_mask.unsqueeze(1)
        losses = self.token_losses
        return self._replace(
            probabilities=self.probabilities.masked_fill(is_padding, 0.0),
            weights=self.weights.masked_fill(is_padding, 0.0),
            experts=self.experts.masked_fill(is_padding, -1),
            token_mask=token_mask,
            is_unpadded=False,
            token_losses=None if losses is None else losses.masked_fill(~token_mask, 0.0),
        )

    @property
    def top_k(self) -> TopK:
        """Expert ids and routing weights, the input of dispatchers."""
        return TopK(self.weights, self.experts, self.is_unpadded)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
