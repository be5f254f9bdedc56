"""Mixture-of-Experts training for PyTorch.

Everything is imported when it is first used. The compiled operators are loaded with `maxmoe.ops`, which the layer
imports; configs, rules, the reference and `maxmoe.testing` need none of them.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxmoe import (  # noqa: F401
        config,
        convert,
        costs,
        expert_load,
        integrations,
        models,
        nn,
        ops,
        optim,
        parallel,
        pipelining,
        presets,
        quantization,
        reference,
        sharding,
        testing,
    )
    from maxmoe._C import empty_cache
    from maxmoe.config import ExpertNorms, MoEConfig, SiTU, ZeroComputation
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
    from maxmoe.parallel.parallelize import parallelize
    from maxmoe.pipelining.pipeline import pipeline

__version__ = "0.2.0"

__all__ = [
    "ExpertNorms",
    "MoE",
    "MoEConfig",
    "MoEFeedForward",
    "MoEOutput",
    "MoEStats",
    "SiTU",
    "StatsAccumulator",
    "StepStats",
    "ZeroComputation",
    "__version__",
    "build_info",
    "empty_cache",
    "keep_routing",
    "mean_over_tokens",
    "parallelize",
    "pipeline",
    "quantize_experts",
    "record_routing",
    "replay_routing",
    "set_aux_loss_scale",
    "set_recompute",
]

_PACKAGES = (
    "config",
    "convert",
    "costs",
    "expert_load",
    "integrations",
    "models",
    "nn",
    "ops",
    "optim",
    "parallel",
    "pipelining",
    "presets",
    "quantization",
    "reference",
    "sharding",
    "testing",
)
_HOMES = {
    **dict.fromkeys(("ExpertNorms", "MoEConfig", "SiTU", "ZeroComputation"), "maxmoe.config"),
    "MoEStats": "maxmoe.expert_load",
    "StatsAccumulator": "maxmoe.expert_load",
    "StepStats": "maxmoe.expert_load",
    "empty_cache": "maxmoe._C",
    "parallelize": "maxmoe.parallel",
    "pipeline": "maxmoe.pipelining",
    "quantize_experts": "maxmoe.convert.expert_quantization",
}


def build_info() -> dict[str, Any]:
    """Return the versions of maxmoe, torch, compiler and Eigen, and the instruction sets and cache of this machine.

    The keys are core (the file of the C++ core), version, torch, compiler, eigen, openmp, isa (the instruction set in
    use), supported_isas (all that the machine supports), cuda_kernels and second_level_cache_bytes. If the core is off,
    not built or cannot be loaded, they are core (the reason) and version.
    """
    try:
        core = importlib.import_module("maxmoe._C")
    except ImportError as error:
        return {"core": str(error), "version": __version__}
    return {"core": core.__file__, **core.build_info()}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"maxmoe.{name}")
    if name not in __all__:
        # With name and obj, Python adds the nearest name to the message.
        raise AttributeError(f"module 'maxmoe' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(_HOMES.get(name, "maxmoe.nn")), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
