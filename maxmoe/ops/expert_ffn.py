"""Routed experts as one operator, or composed of others for a custom activation."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maxmoe import _C
from maxmoe.config import LimitTarget
from maxmoe.ops._projection import Projection, ProjectionLike, as_projection
from maxmoe.ops.products import gmm
from maxmoe.ops.routing import RaggedPlan
from maxmoe.ops.rows import ragged_sort, ragged_unsort


class ActivationFunction(Protocol):
    """Signature of a custom activation: an elementwise function of the projections of rows.

    Called with gate ``(R, F)``, None for experts without a gate, and up ``(R, F)``. Returns a tensor ``(R, F)``.
    """

    def __call__(self, gate: Tensor | None, up: Tensor, /) -> Tensor:
        """Compute the activations ``(R, F)``."""
        ...


def expert_ffn(
    x: Tensor,
    weights: Tensor | None,
    plan: RaggedPlan,
    gate: ProjectionLike | None,
    up: ProjectionLike,
    down: ProjectionLike,
    *,
    activation: str | ActivationFunction = "silu",
    limit: float | None = None,
    limit_target: LimitTarget = "input",
    gate_softcap: float | None = None,
    up_softcap: float | None = None,
    fused_gate: str | None = None,
    recompute: bool = False,
) -> Tensor:
    """Compute the routed experts: gather, gate and up, activation, down, weighted sum.

    y[t, e] = down_e(f(gate_e(x[t])) * up_e(x[t]));
    out[t] = sum_k weights[t, k] * y[t, experts[t, k]]   over the slots that have a row in the plan

    gate_e, up_e and down_e are projections, x -> x (W_e + scale * a_e b_e) + bias_e. Without `gate`: down_e(f(up_e(x)))
    instead. With a limit, the gate is first clipped from above, or f(gate) afterwards, and up on both sides.

    "swigluoai" is gate * sigmoid(1.702 gate) * (up + 1). "situ" is b tanh(gate / b) * sigmoid(gate) * c tanh(up / c),
    with b = gate_softcap and c = up_softcap.

    The forward saves x, the pre-activations ``(R, 2F)`` and the plan: D + 2KF elements per token. The gradient of the
    routing weights is <d out[t] down_e^T, f(...)>, so that no expert output is saved.

    With low-rank factors a matrix stands for W + scale * a b. Neither this sum nor its gradient is formed; the rows
    times `a`, which have r columns, are saved as well. A gradient of a matrix is computed only if it is asked for.

    Args:
        x: ``(T, D)``, floating, tokens.
        weights: ``(T, K)``, floating, routing weights; None for ones.
        plan: plan from `ragged_plan`, for L local experts.
        gate: ``(L, D, F)``, dtype of x: a `Projection`, or its weights alone; None for experts without a gate.
        up: ``(L, D, F)``, dtype of x: a `Projection`, or its weights alone.
        down: ``(L, F, D)``, dtype of x: a `Projection`, or its weights alone.
        activation: f, a name that `MoEConfig.activation` takes; or an elementwise function of gate
            ``(R, F)``, None without a gate, and up ``(R, F)`` in the place of f(gate) * up. With a function the experts
            are composed of `ragged_sort`, `gmm` and `ragged_unsort`: the rows, gate, up, what the function saves, its
            result and the outputs are saved.
        limit: limit of the clipping; None for no clipping. Must be None with "situ" and with a function.
        limit_target: whether the limit clips the gate, the "input" of f, or f(gate), its "output".
        gate_softcap: bound of the linear factor of the gate, positive; with "situ" only, which needs it.
        up_softcap: bound of up, positive; with "situ" only, which needs it.
        fused_gate: layout of the gate in `up`, which is then ``(L, D, 2F)``: "concatenated" if the F columns
            of the gate come before the F columns of up, "interleaved" if they alternate; None if `up` holds no gate.
        recompute: save only x and the plan, and recompute the pre-activations in the backward, with bitwise the same
            gradients. The product with down and the sum are not recomputed.

    Returns:
        ``(T, D)``, dtype of x, weighted sum of the outputs over the experts of each token.

    Raises:
        TypeError: if the function returns no tensor.
        ValueError: if it returns another shape or dtype than up has, or is given with a limit or a softcap.

    Source: SonicMoE (arXiv:2512.14080) for the choice of saved tensors; Kimi K3 for "situ", Step-3.7 for the limit of
    outputs.
    """
    if callable(activation):
        constants = {"limit": limit, "gate_softcap": gate_softcap, "up_softcap": up_softcap}
        for name, value in constants.items():
            if value is not None:
                raise ValueError(
                    f"{name} must be None with a function as activation, which clips by itself, got {value}"
                )
        projections = _given(gate, up, down)
        return _composed_ffn(
            x, weights, plan, projections, activation=activation, fused_gate=fused_gate, recompute=recompute
        )
    if not torch.compiler.is_compiling():
        return _C.expert_ffn(
            x,
            weights,
            plan,
            gate,
            up,
            down,
            activation,
            limit,
            limit_target,
            gate_softcap,
            up_softcap,
            fused_gate,
            recompute,
        )
    arguments: dict[str, Any] = {}
    for name, projection in _given(gate, up, down).items():
        arguments |= projection.arguments(name, x.dtype)
    out: Tensor = torch.ops.maxmoe.expert_ffn(
        x,
        weights,
        plan.slots,
        plan.rows,
        plan.group_sizes,
        plan.top_k,
        **arguments,
        activation=activation,
        limit=limit,
        limit_target=limit_target,
        gate_softcap=gate_softcap,
        up_softcap=up_softcap,
        fused_gate=fused_gate,
        recompute=recompute,
    )
    return out


def _given(gate: ProjectionLike | None, up: ProjectionLike, down: ProjectionLike) -> dict[str, Projection]:
    """Return the projections by name, without the one that is None."""
    projections = {"gate": gate, "up": up, "down": down}
    return {name: as_projection(value) for name, value in projections.items() if value is not None}


def _composed_ffn(
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
