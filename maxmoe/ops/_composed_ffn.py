"""Routed experts with a custom activation, composed of other operators."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maxmoe.ops._projection import Projection
from maxmoe.ops.gmm import gmm
from maxmoe.ops.ragged_plan import RaggedPlan
from maxmoe.ops.ragged_sort import ragged_sort
from maxmoe.ops.ragged_unsort import ragged_unsort


class ActivationFunction(Protocol):
    """Signature of a custom activation: an elementwise function of the projections of rows.

    Called with gate ``(R, F)``, None for experts without a gate, and up ``(R, F)``. Returns a tensor ``(R, F)``.
    """

    def __call__(self, gate: Tensor | None, up: Tensor, /) -> Tensor: ...


def composed_ffn(
    x: Tensor,
    weights: Tensor | None,
    plan: RaggedPlan,
    projections: Mapping[str, Projection],
    *,
    activation: ActivationFunction,
    fused_gate: str | None,
    recompute: bool,
) -> Tensor:
    """Compute `expert_ffn` with gather, products, activation and weighted sum as operators of their own."""

    def project(rows: Tensor, name: str) -> Tensor:
        return gmm(rows, projections[name], plan.group_sizes)

    def compute(x: Tensor, weights: Tensor | None) -> Tensor:
        rows = ragged_sort(x, plan)
        gate_rows = project(rows, "gate") if "gate" in projections else None
        up_rows = project(rows, "up")
        if fused_gate == "interleaved":
            gate_rows, up_rows = up_rows[:, 0::2], up_rows[:, 1::2]
        elif fused_gate is not None:
            gate_rows, up_rows = up_rows.chunk(2, dim=1)
        activated = activate_with(activation, gate_rows, up_rows)
        return ragged_unsort(project(activated, "down"), plan, weights)

    if not recompute or not torch.is_grad_enabled():
        return compute(x, weights)
    outputs: Tensor = checkpoint(compute, x, weights, use_reentrant=False)
    return outputs


def activate_with(activation: ActivationFunction, gate: Tensor | None, up: Tensor) -> Tensor:
    """Return activation(gate, up); raise if it is not a tensor like `up`."""
    activated: object = activation(gate, up)
    if not isinstance(activated, Tensor):
        raise TypeError(f"activation must return a tensor, got {type(activated).__name__}")
    if activated.shape != up.shape or activated.dtype != up.dtype:
        raise ValueError(
            f"activation must return {up.dtype} of shape {tuple(up.shape)}, as it gets, "
            f"got {activated.dtype} of shape {tuple(activated.shape)}"
        )
    return activated
