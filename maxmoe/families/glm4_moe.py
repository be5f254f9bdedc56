from dataclasses import replace

from maxmoe.config import MoEConfig
from maxmoe.families.deepseek_v3 import DEEPSEEK_V3, deepseek_v3
from maxmoe.families.family import PublishedModel


@PublishedModel(
    "GLM-4.5",
    layers=92,
    heads=(96, 8),
    vocab_size=151552,
    dense=(3, 12288),
    differs="no norms and no biases of queries and keys",
)
@replace(DEEPSEEK_V3, model_types=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"))
def glm4_moe() -> MoEConfig:
    """GLM-4.5: as `deepseek_v3`, with fewer and smaller experts and no groups.

    Source: GLM-4.5 Team 2025 (arXiv:2508.06471); config of zai-org/GLM-4.5.
    """
    return deepseek_v3(hidden_size=5120, intermediate_size=1536, num_experts=160, num_groups=1, top_k_groups=1)
