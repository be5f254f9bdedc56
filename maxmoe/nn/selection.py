"""Rules by which a few families select experts."""

from functools import partial
from typing import Literal, get_args

from torch import Tensor

from maxmoe.checks.fields import check_choice
from maxmoe.config import MoEConfig
from maxmoe.config.components import GroupScore, RouterRule, component
from maxmoe.ops import route
from maxmoe.reference.routing import selected_by_scores, wide


@component
class Selection(RouterRule):
    """Router that selects experts by their logits, by other scores of groups, or outside of the best groups too.

    Args:
        by: whether experts are selected by their "scores" or by their "logits", as in Kolibri; the correction bias is
            added to either.
        group_score: score of a group: the sum of its two best scores, "top2", or its best score, "max", as in
            DeepSeek-V2.
        other_groups: what becomes of the experts of all other groups: they are "excluded", or selected with a score of
            "zero", bias included, if fewer than K experts of the best groups have a higher one, as in A.X-K2.
    """

    by: Literal["scores", "logits"] = "scores"
    group_score: GroupScore = "top2"
    other_groups: Literal["excluded", "zero"] = "excluded"

    def __post_init__(self) -> None:
        check_choice("by", self.by, ("scores", "logits"))
        check_choice("group_score", self.group_score, get_args(GroupScore))
        check_choice("other_groups", self.other_groups, ("excluded", "zero"))

    def is_plain(self, config: MoEConfig) -> bool:
        """Return whether `maxmoe.ops.route` selects by the rule, which has no further parts in a subclass."""
        return type(self) is Selection and self._is_of_route(config)

    def _is_of_route(self, config: MoEConfig) -> bool:
        return self.selects_by_scores and not self._scores_others(config)

    def _scores_others(self, config: MoEConfig) -> bool:
        return self.other_groups == "zero" and config.top_k_groups < config.num_groups

    @property
    def selects_by_scores(self) -> bool:
        """Whether experts are selected by their scores."""
        return self.by == "scores"

    def select(self, config: MoEConfig, logits: Tensor, correction_bias: Tensor | None) -> Tensor | None:
        """Select experts ``(T, K)`` by rules that `maxmoe.ops.route` has, where it does not have this one."""
        if self._is_of_route(config):
            return None
        in_groups = partial(
            route,
            logits,
            score_function=config.score_function if self.selects_by_scores else "identity",
            correction_bias=correction_bias,
            num_groups=config.num_groups,
            top_k_groups=config.top_k_groups,
            group_score=self.group_score,
            normalization="none",
        )
        if not self._scores_others(config):
            return in_groups(config.top_k)[1]
        scores, members, _ = in_groups(config.num_experts // config.num_groups * config.top_k_groups)
        if correction_bias is not None:
            scores = scores + correction_bias[members]
        of_all = scores.new_zeros(logits.shape).scatter(1, members, scores)
        return route(of_all, config.top_k, score_function="identity")[1]

    def reference_select(self, config: MoEConfig, logits: Tensor, correction_bias: Tensor | None) -> Tensor:
        """Select experts ``(T, K)`` token by token."""
        scores = None if self.selects_by_scores else wide(logits)
        return selected_by_scores(
            config,
            logits,
            correction_bias,
            self.group_score,
            others=scores,
            others_are_zero=self.other_groups == "zero",
        )
