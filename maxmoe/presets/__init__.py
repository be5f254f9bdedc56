"""Published model families: their configs, and the names of their fields and weights in transformers."""

from maxmoe.presets.families import from_transformers
from maxmoe.presets.published import (
    dbrx,
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    jetmoe,
    kimi_k2,
    llama4,
    longcat_flash,
    minimax_m2,
    mixtral,
    nemotron_h,
    olmoe,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
    switch_transformers,
)

__all__ = [
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "from_transformers",
    "glm4_moe",
    "gpt_oss",
    "jetmoe",
    "kimi_k2",
    "llama4",
    "longcat_flash",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "switch_transformers",
]
