"""Mixture-of-Experts training for PyTorch."""

from maxmoe import presets
from maxmoe._library import build_info
from maxmoe.config import MoEConfig
from maxmoe.nn import MoE, MoEOutput, MoEStats, keep_routing, mean_over_tokens
from maxmoe.parallel import parallelize

__all__ = [
    "MoE",
    "MoEConfig",
    "MoEOutput",
    "MoEStats",
    "build_info",
    "keep_routing",
    "mean_over_tokens",
    "parallelize",
    "presets",
]
