from dataclasses import replace

from maxmoe.config import MoEConfig
from maxmoe.families.family import DEEPSEEK_V3_FIELDS, LATENT, Family, PublishedModel, sizes
from maxmoe.families.layouts import GATE_BIASED, GATE_BIASED_OUTSIDE, PROJ, SHARED, Layout, stacked

DEEPSEEK_V3 = Family(
    model_types=("deepseek_v3", "deepseek_v32", "dots1", "solar_open"),
    fields=DEEPSEEK_V3_FIELDS,
    required={"scoring_func": ["sigmoid"], "topk_method": ["noaux_tc"]},
    block=Layout("mlp", GATE_BIASED + stacked() + SHARED),
    stored=Layout("mlp", GATE_BIASED + PROJ + SHARED),
)


@PublishedModel("DeepSeek-V3", layers=61, heads=(128,), vocab_size=129280, dense=(3, 18432), differs=LATENT)
@DEEPSEEK_V3
def deepseek_v3() -> MoEConfig:
    """DeepSeek-V3: sigmoid scores, four of eight groups, and a correction bias for loss-free balancing.

    Source: DeepSeek-AI 2024 (arXiv:2412.19437), section 4.2 for the losses; config of deepseek-ai/DeepSeek-V3.
    """
    return MoEConfig(
        **sizes(7168, 2048, 256, 8),
        score_function="sigmoid",
        score_correction_bias=True,
        num_groups=8,
        top_k_groups=4,
        routed_scaling_factor=2.5,
        num_shared_experts=1,
        load_balance_loss_weight=0.0001,
        correction_bias_update_rate=0.001,
    )


replace(
    DEEPSEEK_V3,
    model_types=("exaone_moe",),
    fields=DEEPSEEK_V3_FIELDS | {"num_experts": "num_experts", "num_shared_experts": "num_shared_experts"},
    stored=Layout("mlp", GATE_BIASED_OUTSIDE + PROJ + SHARED),
).register(deepseek_v3)
