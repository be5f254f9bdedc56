from typing import Any

from maxmoe.config import MoEConfig
from maxmoe.families.family import DEEPSEEK_FIELDS, LATENT, Family, Field, PublishedModel, sizes, value_at
from maxmoe.families.layouts import GATE, PROJ, SHARED, Layout, stacked
from maxmoe.nn.selection import Selection


def _num_groups(config: Any, path: str) -> Any:
    return 1 if getattr(config, "topk_method", None) == "greedy" else value_at(config, path)


@PublishedModel("DeepSeek-V2", layers=60, heads=(128,), vocab_size=102400, dense=(1, 12288), differs=LATENT)
@Family(
    fields=DEEPSEEK_FIELDS
    | {"num_groups": Field("n_group", _num_groups), "top_k_groups": Field("topk_group", _num_groups)},
    required={
        "scoring_func": ["softmax"],
        "topk_method": ["greedy", "group_limited_greedy"],
        "norm_topk_prob": [False],
        "mlp_bias": [False],
    },
    block=Layout("mlp", GATE + stacked() + SHARED),
    stored=Layout("mlp", GATE + PROJ + SHARED),
)
def deepseek_v2() -> MoEConfig:
    """DeepSeek-V2: softmax over all experts, weights not renormalized, three of eight groups, two shared experts.

    Source: DeepSeek-AI 2024 (arXiv:2405.04434), the expert-level loss in section 3.1.2; config of
    deepseek-ai/DeepSeek-V2.
    """
    return MoEConfig(
        **sizes(5120, 1536, 160, 6),
        num_groups=8,
        top_k_groups=3,
        router=Selection(group_score="max"),
        normalization="none",
        routed_scaling_factor=16.0,
        num_shared_experts=2,
        load_balance_loss_weight=0.003,
    )
