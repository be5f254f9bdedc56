from typing import Any

from maxmoe.config import MoEConfig
from maxmoe.families.family import FIELDS, Family, Field, loss_weight, number_at, sizes
from maxmoe.families.layouts import GATE, OPTIONAL_SHARED, PROJ, Entry, Layout, stacked
from maxmoe.nn.sum_normalization import SumNormalization


def _bias(module: str) -> Entry:
    return Entry(f"{module}.e_score_correction_bias", ("router.score_correction_bias",), unsqueezed=True)


def _router(config: Any, path: str) -> SumNormalization:
    return SumNormalization(minimum=number_at(config, path, above=0))


def _balance(config: Any, path: str) -> Any:
    return loss_weight(config, path, "moe_k")


@Family(
    fields=FIELDS
    | {
        "intermediate_size": "moe_intermediate_size",
        "num_experts": "moe_num_experts",
        "top_k": "moe_k",
        "num_shared_experts": "moe_num_shared_experts",
        "router": Field("moe_norm_min", _router),
        "load_balance_loss_weight": Field("router_aux_loss_coef", _balance),
    },
    required={"use_bias": [False]},
    block=Layout("mlp", (*GATE, _bias("gate.moe_statics"), *stacked(), *OPTIONAL_SHARED)),
    stored=Layout("mlp", (*GATE, _bias("moe_statics"), *PROJ, *OPTIONAL_SHARED)),
)
def ernie4_5_moe() -> MoEConfig:
    """ERNIE-4.5-21B-A3B: six of 64 experts by their softmax plus a correction bias, and two shared experts.

    The divisor of the weights is at least 1e-12.

    Source: defaults of Ernie4_5_MoeConfig in transformers 5.24, which names baidu/ERNIE-4.5-21B-A3B-PT; the update rate
    of the bias is not published.
    """
    return MoEConfig(
        **sizes(2560, 1536, 64, 6),
        score_correction_bias=True,
        router=SumNormalization(minimum=1e-12),
        num_shared_experts=2,
        load_balance_loss_weight=0.001 * 6,
        load_balance_scope="batch",
    )
