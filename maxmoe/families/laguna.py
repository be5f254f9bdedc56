from typing import Any

import torch
from torch import Tensor

from maxmoe.checks.fields import check_number
from maxmoe.config import MoEConfig
from maxmoe.config.components import RouterRule, component
from maxmoe.families.family import QWEN2_FIELDS, Family, Field, number_at, sizes, without
from maxmoe.families.layouts import GATE_BIASED, PROJ, SHARED, Layout, router, shared, stacked


@component
class SoftcappedLogits(RouterRule):
    """Router whose logits are softcap * tanh((x @ weight^T + bias) / softcap), as in Laguna."""

    softcap: float

    def __post_init__(self) -> None:
        check_number("softcap", self.softcap, above=0)

    def logits(self, products: Tensor) -> Tensor:
        """Bound the linear map by the softcap."""
        return (products / self.softcap).tanh() * self.softcap

    def reference_logits(self, logits: Tensor) -> Tensor:
        """Bound the linear map by the softcap: tanh(z) = (exp(2z) - 1) / (exp(2z) + 1)."""
        return self.softcap * torch.expm1(2 * logits / self.softcap) / (torch.exp(2 * logits / self.softcap) + 1)


def _router(config: Any, path: str) -> Any:
    softcap = number_at(config, path, at_least=0)
    return SoftcappedLogits(softcap=softcap) if softcap else "learned"


@Family(
    fields=without("normalization", QWEN2_FIELDS)
    | {
        "routed_scaling_factor": "moe_routed_scaling_factor",
        "router": Field("moe_router_logit_softcapping", _router),
    },
    required={"moe_apply_router_weight_on_input": [False]},
    block=Layout("mlp", GATE_BIASED + stacked() + SHARED),
    stored=Layout("mlp", router("gate", "experts.e_score_correction_bias") + PROJ + shared("shared_expert")),
    scales_sum=True,
)
def laguna() -> MoEConfig:
    """Laguna XS.2: eight of 256 small experts by their sigmoid, a correction bias, and a shared expert.

    Models of the family may bound the logits: ``SoftcappedLogits(softcap=...)``.

    Source: defaults of LagunaConfig in transformers 5.24, which names poolside/laguna-XS.2; the update rate of the bias
    is not published.
    """
    return MoEConfig(
        **sizes(2048, 512, 256, 8),
        score_function="sigmoid",
        score_correction_bias=True,
        num_shared_experts=1,
        load_balance_loss_weight=0.001 * 8,
        load_balance_scope="batch",
    )
