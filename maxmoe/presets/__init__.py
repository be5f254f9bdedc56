"""Published model families: their configs, and the names of their fields and weights in transformers."""

from maxmoe.presets.families import from_transformers
from maxmoe.presets.published import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
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
)
from maxmoe.presets.published_2026 import axk2, beam, inkling, kolibri1, mistral_large4, muse_spark

__all__ = [
    "axk2",
    "beam",
    "deepseek_v2",
    "deepseek_v3",
    "from_transformers",
    "glm4_moe",
    "gpt_oss",
    "inkling",
    "kimi_k2",
    "kolibri1",
    "llama4",
    "longcat_flash",
    "minimax_m2",
    "mistral_large4",
    "mixtral",
    "muse_spark",
    "nemotron_h",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
]
