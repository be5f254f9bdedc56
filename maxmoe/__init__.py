"""Mixture-of-Experts training for PyTorch."""

from maxmoe import presets
from maxmoe._library import build_info
from maxmoe.config import MoEConfig
from maxmoe.nn import (
    MoE,
    MoEFeedForward,
    MoEOutput,
    MoEStats,
    StatsAccumulator,
    StepStats,
    keep_routing,
    set_aux_loss_scale,
)
from maxmoe.parallel import parallelize

__version__ = build_info()["version"]

__all__ = [
    "MoE",
    "MoEConfig",
    "MoEFeedForward",
    "MoEOutput",
    "MoEStats",
    "StatsAccumulator",
    "StepStats",
    "__version__",
    "build_info",
    "keep_routing",
    "parallelize",
    "presets",
    "set_aux_loss_scale",
]
