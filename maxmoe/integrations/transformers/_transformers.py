"""Every private name of transformers that this package uses; a lint rule refuses them in any other file.

None has a public alternative. Checked with transformers 5.20 and later.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import _default_apply_gate


def own_gate_name(experts: Any) -> str | None:
    """Return the full name of the gate that a family of gated experts defines; None if it is act_fn(gate) * up."""
    name: str | None = _gate_name(type(experts))
    return name


# torch.compile reads another __qualname__ of functions.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _gate_name(kind: Any) -> str | None:
    gate = kind._apply_gate
    return None if gate is _default_apply_gate else f"{gate.__module__}.{gate.__qualname__}"


def own_gate(experts: Any, projected: Tensor) -> Tensor:
    """Apply the gate of a family's experts to the fused projections ``(R, 2F)``."""
    activated: Tensor = experts._apply_gate(projected)
    return activated


def is_experts(module: Any) -> bool:
    """Return whether a module is decorated with `use_experts_implementation`."""
    return hasattr(type(module), "_apply_gate") and hasattr(module, "_is_expert_parallel")


def is_expert_parallel(experts: Any) -> bool:
    """Return whether transformers' own expert parallelism has sharded the experts."""
    return bool(experts._is_expert_parallel)


def experts_implementation(config: Any) -> str:
    """Return the experts implementation that is set for a model."""
    implementation: str = config._experts_implementation
    return implementation


def allow_experts_implementation(model_class: Any) -> None:
    """Allow an experts implementation for models whose source lacks the decorator that transformers looks for."""
    model_class._can_set_experts_implementation_cached_value = True
