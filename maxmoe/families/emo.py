from typing import Any, ClassVar

import torch
from torch import Tensor

from maxmoe._torch.forward_values import of_forward
from maxmoe.checks.fields import check_int
from maxmoe.config import MoEConfig, ScoreFunction
from maxmoe.config.components import RouterIds, RouterRule, component
from maxmoe.nn.random_numbers import uniform_of
from maxmoe.nn.router import Router
from maxmoe.ops import route
from maxmoe.ranks.token_group import TokenGroup
from maxmoe.reference.routing import best, scores, stack


@component
class DocumentPools(RouterRule):
    """Router that selects the experts of all tokens of a document from one pool of experts, as in EMO.

    The pool of document d has the n_d experts with the largest sums of scores over its tokens, later tokens included:

        S_d[e] = sum over the tokens t of d of scores[t, e]

    Each token selects the K experts of the pool with the best scores, which give its weights. The scores of
    score_function="identity" are here the softmax of the logits. A document is the tokens of a sequence with the same
    id, the argument `router_inputs` of the layer. In training, n_d is drawn anew in each forward of each layer.

    Args:
        min_size: smallest n_d, at least K.
        max_size: largest n_d.
        eval_size: n_d in evaluation mode; None for the mean of both, rounded down.

    Source: EmoRouterV2 and EmoRouterConfig of OLMo-core 3.0.
    """

    min_size: int
    max_size: int
    eval_size: int | None = None

    takes_ids: ClassVar[RouterIds | None] = "documents"

    def __post_init__(self) -> None:
        for name in ("min_size", "max_size", "eval_size"):
            if name != "eval_size" or self.eval_size is not None:
                check_int(name, getattr(self, name), at_least=1)
        if self.max_size < self.min_size:
            raise ValueError(f"max_size ({self.max_size}) must be at least min_size ({self.min_size})")

    def check(self, config: MoEConfig) -> None:
        """Raise for pools smaller than K or larger than all experts, and for other rules of selection."""
        config.require(str(self), num_groups=1, score_correction_bias=False)
        for name, size in (("min_size", self.min_size), ("max_size", self.max_size), ("eval_size", self.size)):
            if not config.top_k <= size <= config.num_selectable_experts:
                raise ValueError(
                    f"{name} must be in [top_k ({config.top_k}), number of experts ({config.num_selectable_experts})], "
                    f"got {size}"
                )

    @property
    def size(self) -> int:
        """Number of experts of a pool in evaluation mode."""
        return (self.min_size + self.max_size) // 2 if self.eval_size is None else self.eval_size

    def make(self, config: MoEConfig, **options: Any) -> Router:
        """Create the router."""
        return DocumentPoolRouter(config, **options)

    def reference_select_by_ids(self, config: MoEConfig, logits: Tensor, ids: Tensor, _parameters: Any) -> Tensor:
        """Select the experts of a sequence, document by document, with pools of evaluation mode."""
        kind: ScoreFunction = "softmax" if config.score_function == "identity" else config.score_function
        of_tokens = scores(logits, kind)
        chosen: dict[int, Tensor] = {}
        for document in set(ids.tolist()):
            members = [token for token, each in enumerate(ids.tolist()) if each == document]
            total = torch.stack([of_tokens[token] for token in members]).sum(0)
            pool = best(total.tolist(), list(range(len(total))), self.size)
            chosen |= {token: torch.tensor(best(of_tokens[token].tolist(), pool, config.top_k)) for token in members}
        rows = [chosen[token] for token in range(len(ids))]
        return stack(rows, torch.empty(0, dtype=torch.int64), config.top_k)


class DocumentPoolRouter(Router):
    """`Router` with `DocumentPools`; all ranks with tokens of a document select the same pool."""

    rule: DocumentPools

    def select_by_ids(self, logits: Tensor, ids: Tensor, token_mask: Tensor | None) -> Tensor:
        """Select from the pools of the documents, to which padding does not belong."""
        of_tokens = _scores(logits, self.config.score_function)
        counted = of_tokens if token_mask is None else of_tokens.masked_fill(~token_mask.unsqueeze(1), 0.0)
        sums = _sums_of_documents(counted.view(*ids.shape, counted.shape[1]), ids, self.token_group)
        best_first = sums.argsort(dim=1, descending=True, stable=True)
        places = torch.arange(sums.shape[1], device=sums.device)
        is_in_pool = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best_first, places < self._sizes(ids))
        # Scores are not negative.
        in_pool: Tensor = of_tokens.masked_fill(~is_in_pool, -1.0)
        return route(in_pool, self.config.top_k, score_function="identity")[1]

    def _sizes(self, ids: Tensor) -> Tensor:
        """Return the sizes ``(T, 1)`` of the pools of the tokens' documents."""
        rule = self.rule
        if not of_forward(self, self.training):
            return torch.full((ids.numel(), 1), rule.size, device=ids.device)
        key = torch.randint(-(2**63), 2**63 - 1, (), device="cpu")
        num_sequences, length = ids.shape
        first_of_sequences = self.token_group.numbers(num_sequences, length, ids.device) // 2**32 * 2**32
        uniform: Tensor = uniform_of(key, (first_of_sequences + ids).view(-1), 1, torch.float64)
        return rule.min_size + (uniform * (rule.max_size - rule.min_size + 1)).long()


def _scores(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    match score_function:
        case "sigmoid":
            return logits.sigmoid()
        case "sqrtsoftplus":
            return torch.nn.functional.softplus(logits).sqrt()
        case _:
            return logits.softmax(-1)


def _sums_of_documents(scores: Tensor, ids: Tensor, tokens: TokenGroup) -> Tensor:
    """Return the sums of scores ``(B, S, E)`` over the document of each token ``(T, E)``, float64.

    All ranks with a part of a sequence gather it whole, so that the bits of its sums are the same on all of them.
    """
    whole_ids, whole = tokens.all_gather_sequence(ids, dim=1), tokens.all_gather_sequence(scores, dim=1)
    in_order = whole_ids.sort(1).values
    num_sequences, length = whole_ids.shape
    first_rows = length * torch.arange(num_sequences, device=ids.device).unsqueeze(1)
    # The place of the first token with the same id in the order of the ids is a number of the document below N.
    rows = first_rows + torch.searchsorted(in_order, whole_ids)
    sums = whole.new_zeros(num_sequences * length, whole.shape[2], dtype=torch.float64)
    sums.index_add_(0, rows.flatten(), whole.flatten(0, 1).double())
    return sums[(first_rows + torch.searchsorted(in_order, ids)).flatten()]
