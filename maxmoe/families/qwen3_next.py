from dataclasses import replace

from maxmoe.config import MoEConfig
from maxmoe.families.family import QWEN2_FIELDS, PublishedModel, sizes, without
from maxmoe.families.qwen2_moe import QWEN2_MOE


@PublishedModel(
    "Qwen3-Next-80B-A3B",
    layers=48,
    heads=(16, 2, 256),
    vocab_size=151936,
    differs="plain attention in all layers instead of linear attention in three of four",
)
@replace(QWEN2_MOE, model_types=("qwen3_next",))
def qwen3_next() -> MoEConfig:
    """Qwen3-Next-80B-A3B: ten of 512 small experts, and a gated shared expert.

    Source: config of Qwen/Qwen3-Next-80B-A3B-Instruct.
    """
    return MoEConfig(
        **sizes(2048, 512, 512, 10),
        num_shared_experts=1,
        shared_expert_gate=True,
        load_balance_loss_weight=0.001 * 10,
        load_balance_scope="batch",
    )


# The config of Qwen3.5 does not say whether the weights are normalized.
replace(QWEN2_MOE, model_types=("qwen3_5_moe_text",), fields=without("normalization", QWEN2_FIELDS)).register(
    qwen3_next
)
