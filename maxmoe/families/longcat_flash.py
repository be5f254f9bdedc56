from dataclasses import replace
from typing import Any

from maxmoe.config import MoEConfig
from maxmoe.config.components import ZeroComputation
from maxmoe.families.family import Family, Field, sizes, value_at
from maxmoe.families.layouts import PROJ, Layout, router, stacked

_ROUTER = router("router.classifier", correction_bias="router.e_score_correction_bias")


def _copies(config: Any, path: str) -> ZeroComputation:
    return ZeroComputation(copy=value_at(config, path, 0))


@Family(
    fields={
        "hidden_size": "hidden_size",
        "intermediate_size": "expert_ffn_hidden_size",
        "num_experts": "n_routed_experts",
        "zero_computation": Field("zero_expert_num", _copies),
        "top_k": "moe_topk",
        "routed_scaling_factor": "routed_scaling_factor",
    },
    required={
        "hidden_act": ["silu"],
        "norm_topk_prob": [False],
        "router_bias": [False],
        "zero_expert_type": ["identity"],
    },
    # Gate and up of transformers have a matrix for each copy expert as well.
    block=Layout("mlp", _ROUTER + tuple(replace(entry, has_unused_matrices=True) for entry in stacked())),
    stored=Layout("mlp", _ROUTER + PROJ),
)
def longcat_flash() -> MoEConfig:
    """LongCat-Flash: one copy expert for two others, so that a token uses 8 of its 12 experts on average.

    The bias is moved by other rules than here, which keep this average, and the weight of the balance loss is not
    published.

    Source: Meituan LongCat Team 2025 (arXiv:2509.01322); config of meituan-longcat/LongCat-Flash-Chat.
    """
    return MoEConfig(
        **sizes(6144, 2048, 512, 12),
        zero_computation=ZeroComputation(copy=256),
        score_correction_bias=True,
        normalization="none",
        routed_scaling_factor=6.0,
    )
