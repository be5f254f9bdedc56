"""Mixture-of-Experts training for PyTorch."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from maxmoe._library import build_info

# isort: split
# After the core, which names a torch that does not fit, before another module misses something in that torch.
from maxmoe import presets, quantization
from maxmoe.adapters import connect_when_imported
from maxmoe.config import MoEConfig
from maxmoe.convert.expert_quantization import quantize_experts
from maxmoe.expert_load import MoEStats, StatsAccumulator, StepStats
from maxmoe.nn import (
    MoE,
    MoEFeedForward,
    MoEOutput,
    keep_routing,
    mean_over_tokens,
    record_routing,
    replay_routing,
    set_aux_loss_scale,
    set_recompute,
)
from maxmoe.ops._memory import empty_cache

if TYPE_CHECKING:
    from maxmoe import (  # noqa: F401
        convert,
        integrations,
        models,
        optim,
        parallel,
        pipelining,
        planning,
        reference,
        sharding,
        testing,
    )
    from maxmoe.parallel import parallelize
    from maxmoe.pipelining import pipeline

connect_when_imported()

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
    "pipeline",
    "presets",
    "quantization",
    "quantize_experts",
    "record_routing",
    "replay_routing",
    "set_aux_loss_scale",
    "set_recompute",
]


# Imported when they are first used: DTensor takes as long to import as the rest of torch, transformers longer.
_LAZY_MODULES = (
    "convert",
    "integrations",
    "models",
    "optim",
    "parallel",
    "pipelining",
    "planning",
    "reference",
    "sharding",
    "testing",
)
_LAZY_FUNCTIONS = {"parallelize": "maxmoe.parallel", "pipeline": "maxmoe.pipelining"}


def __getattr__(name: str) -> Any:
    if name in _LAZY_FUNCTIONS:
        return getattr(importlib.import_module(_LAZY_FUNCTIONS[name]), name)
    if name in _LAZY_MODULES:
        return importlib.import_module(f"maxmoe.{name}")
    # With name and obj, Python adds the nearest name to the message.
    raise AttributeError(f"module 'maxmoe' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY_MODULES, "expert_load", "nn", "ops"})
