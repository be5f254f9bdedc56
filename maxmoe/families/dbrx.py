from functools import partial
from typing import Any

from maxmoe.config import MoEConfig
from maxmoe.families.family import Family, Field, PublishedModel, attribute_at, loss_weight, sizes, value_at
from maxmoe.families.layouts import Entry, Layout, router


def _activation(config: Any, path: str) -> Any:
    return value_at(config, path).get("name", "silu")


def _normalization(config: Any, path: str) -> str:
    return "none" if attribute_at(config, path) is None else "sum"  # p of the p-norm that divides the weights


@PublishedModel("DBRX", layers=40, heads=(48, 8), vocab_size=100352, differs="no clipping of queries, keys and values")
@Family(
    fields={
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_config.ffn_hidden_size",
        "num_experts": "ffn_config.moe_num_experts",
        "top_k": "ffn_config.moe_top_k",
        "activation": Field("ffn_config.ffn_act_fn", _activation),
        "normalization": Field("ffn_config.moe_normalize_expert_weights", _normalization),
        "load_balance_loss_weight": Field(
            "ffn_config.moe_loss_weight", partial(loss_weight, top_k="ffn_config.moe_top_k")
        ),
    },
    required={"ffn_config.moe_jitter_eps": [None, 0], "ffn_config.moe_normalize_expert_weights": [1, None]},
    block=Layout(
        "ffn",
        (
            *router("router.layer"),
            Entry("experts.mlp.w1", ("experts.gate_proj",), transposed=True, is_flat=True),
            Entry("experts.mlp.v1", ("experts.up_proj",), transposed=True, is_flat=True),
            Entry("experts.mlp.w2", ("experts.down_proj",), is_flat=True),
        ),
    ),
)
def dbrx() -> MoEConfig:
    """DBRX: softmax over all experts, the weights of four of sixteen divided by their sum.

    Source: config of databricks/dbrx-instruct.
    """
    return MoEConfig(**sizes(6144, 10752, 16, 4), load_balance_loss_weight=0.05 * 4, load_balance_scope="batch")
