from typing import Any

from maxmoe.config import MoEConfig
from maxmoe.families.family import FIELDS, Family, Field, normalization, sizes, value_at, without
from maxmoe.families.layouts import GATE, W123, Entry, Layout, stacked
from maxmoe.nn.sum_normalization import SumNormalization

_ROUTER = (*GATE, Entry("expert_bias", ("router.score_correction_bias",), is_optional=True))
_EPS = 1e-6  # a constant in the router of transformers


def _router(config: Any, path: str) -> Any:
    return SumNormalization(eps=_EPS) if value_at(config, path) else "learned"


@Family(
    fields=without("activation", FIELDS)
    | {
        "intermediate_size": "moe_intermediate_size",
        "num_experts": "num_experts",
        "score_correction_bias": "use_expert_bias",
        "normalization": Field("norm_topk_prob", normalization),
        "router": Field("norm_topk_prob", _router),
        "routed_scaling_factor": "routed_scaling_factor",
    },
    block=Layout("feed_forward", _ROUTER + stacked()),
    stored=Layout("feed_forward", _ROUTER + W123),
)
def lfm2_moe() -> MoEConfig:
    """LFM2-8B-A1B: four of 32 experts by their sigmoid plus a correction bias; 1e-6 is added to the sum of the weights.

    Source: defaults of Lfm2MoeConfig in transformers 5.24, which names LiquidAI/LFM2-8B-A1B; loss weights and the
    update rate of the bias are not published.
    """
    return MoEConfig(
        **sizes(2048, 1792, 32, 4),
        score_function="sigmoid",
        score_correction_bias=True,
        router=SumNormalization(eps=_EPS),
    )
