"""Mixture-of-Experts training for PyTorch."""

from typing import TYPE_CHECKING, Any

from maxmoe._library import build_info

# isort: split
# After the core, which names a torch that does not fit, before another module misses something in that torch.
from maxmoe import presets
from maxmoe.config import MoEConfig
from maxmoe.nn import (
    MoE,
    MoEFeedForward,
    MoEOutput,
    MoEStats,
    StatsAccumulator,
    StepStats,
    keep_routing,
    mean_over_tokens,
    record_routing,
    replay_routing,
    set_aux_loss_scale,
    set_recompute,
)
from maxmoe.ops._memory import empty_cache

if TYPE_CHECKING:
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
    "empty_cache",
    "keep_routing",
    "mean_over_tokens",
    "parallelize",
    "presets",
    "record_routing",
    "replay_routing",
    "set_aux_loss_scale",
    "set_recompute",
]


def __getattr__(name: str) -> Any:
    if name == "parallelize":  # DTensor takes as long to import as the rest of torch
        from maxmoe.parallel import parallelize

        return parallelize
    raise AttributeError(f"module 'maxmoe' has no attribute {name!r}")
