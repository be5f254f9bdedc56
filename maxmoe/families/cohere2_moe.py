from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from maxmoe.checks.fields import check_number
from maxmoe.config import MoEConfig
from maxmoe.config.components import Scored, Weighed, component
from maxmoe.families.family import FIELDS, Family, Field, sizes, value_at
from maxmoe.families.layouts import GATE, OPTIONAL_SHARED, PROJ, Layout, stacked
from maxmoe.nn.selection import Selection


@component
class ConstantSharedWeight(Selection):
    """`Selection` that gives the shared experts a constant weight; 0.5 for the mean of routed and shared experts."""

    weight: float = 0.5

    weighs_shared_experts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("weight", self.weight, above=0)

    def check(self, config: MoEConfig) -> None:
        """Raise without shared experts, and with a gate, which gives them another weight."""
        config.require_shared_experts(str(self))
        config.require(str(self), shared_expert_gate=False)

    def weigh(self, config: MoEConfig, weights: Tensor, of_shared: Tensor | None) -> Weighed:
        """Return the weights of the selected experts as they are, and the constant."""
        return weights, weights.new_full((weights.shape[0], 1), self.weight)

    def reference_weights(self, config: MoEConfig, scored: Scored, parameters: Mapping[str, Tensor]) -> Weighed:
        """Return the weights of the selected experts as they are, and the constant."""
        rows = [[self.weight]] * len(scored.weights)
        return scored.weights, torch.tensor(rows, dtype=scored.weights.dtype).reshape(-1, 1)


def _is_mean(config: Any) -> bool:
    return bool(value_at(config, "num_shared_experts") and config.shared_expert_combination_strategy == "average")


def _router(config: Any, path: str) -> Any:
    # The selected logits are normalized by softmax, or their sigmoid by its sum.
    selection = Selection(by="logits" if value_at(config, path) == "sigmoid" else "scores")
    if _is_mean(config):
        return ConstantSharedWeight(by=selection.by)
    return selection if selection.by == "logits" else "learned"


def _score_function(config: Any, path: str) -> str:
    return "sigmoid" if value_at(config, path) == "sigmoid" else "identity"


def _normalization(config: Any, path: str) -> str:
    if value_at(config, path) == "softmax":
        return "softmax"
    return "sum" if config.norm_topk_prob else "none"


def _factor(config: Any, path: str) -> float:
    return 0.5 if _is_mean(config) else 1.0


@Family(
    fields=FIELDS
    | {
        "intermediate_size": "intermediate_size",
        "num_experts": "num_experts",
        "num_shared_experts": "num_shared_experts",
        "router": Field("expert_selection_fn", _router),
        "score_function": Field("expert_selection_fn", _score_function),
        "normalization": Field("expert_selection_fn", _normalization),
        "routed_scaling_factor": Field("shared_expert_combination_strategy", _factor),
    },
    required={
        "expert_selection_fn": ["softmax", "sigmoid"],
        "shared_expert_combination_strategy": ["average", "sum"],
    },
    block=Layout("mlp", GATE + stacked() + OPTIONAL_SHARED),
    stored=Layout("mlp", GATE + PROJ + OPTIONAL_SHARED),
    scales_sum=True,
)
def cohere2_moe() -> MoEConfig:
    """Defaults of Cohere2MoeConfig: softmax over the two selected logits of eight.

    With shared experts, the output is their sum, or the mean of routed and shared experts:
    ``routed_scaling_factor=0.5, router=ConstantSharedWeight(weight=0.5)``. With a sigmoid, experts are selected by
    their logits.

    Source: Cohere2MoeConfig of transformers 5.24. The sizes of a published model are not in it.
    """
    return MoEConfig(**sizes(8192, 22528, 8, 2), score_function="identity", normalization="softmax")
