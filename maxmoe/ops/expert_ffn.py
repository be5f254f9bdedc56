"""Fused operator that computes the routed experts."""

from typing import Any

import torch
from torch import Tensor

from maxmoe.ops._composed_ffn import ActivationFunction, composed_ffn
from maxmoe.ops._fake import register_fake
from maxmoe.ops._projection import ProjectionLike, as_projection, out_size
from maxmoe.ops.ragged_plan import RaggedPlan


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
    fused_gate: str | None = None,
    recompute: bool = False,
) -> Tensor:
    """Compute the routed experts: gather, gate and up, activation, down, weighted sum.

    y[t, e] = down_e(f(gate_e(x[t])) * up_e(x[t]));
    out[t] = sum_k weights[t, k] * y[t, experts[t, k]]   over the slots that have a row in the plan

    gate_e, up_e and down_e are projections, x -> x (W_e + scale * a_e b_e) + bias_e. Without `gate`: down_e(f(up_e(x)))
    instead. With a limit, the gate is first clipped from above, and up on both sides. "swigluoai" is
    gate * sigmoid(1.702 gate) * (up + 1).

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
        activation: f: "silu", "gelu", "gelu_tanh", "relu", "relu2" or "swigluoai"; or an elementwise function of gate
            ``(R, F)``, None without a gate, and up ``(R, F)`` in the place of f(gate) * up. With a function the experts
            are composed of `ragged_sort`, `gmm` and `ragged_unsort`: the rows, gate, up, what the function saves, its
            result and the outputs are saved.
        limit: limit of the clipping; None for no clipping. Must be None with a function.
        fused_gate: layout of the gate in `up`, which is then ``(L, D, 2F)``: "concatenated" if the F columns
            of the gate come before the F columns of up, "interleaved" if they alternate; None if `up` holds no gate.
        recompute: save only x and the plan, and recompute the pre-activations in the backward, with bitwise the same
            gradients. The product with down and the sum are not recomputed.

    Returns:
        ``(T, D)``, dtype of x, weighted sum of the outputs over the experts of each token.

    Raises:
        TypeError: if the function returns no tensor.
        ValueError: if it returns another shape or dtype than that of up, or is given with a limit.

    Source: SonicMoE (arXiv:2512.14080) for the choice of saved tensors.
    """
    projections = {"gate": gate, "up": up, "down": down}
    given = {name: as_projection(value) for name, value in projections.items() if value is not None}
    if callable(activation):
        if limit is not None:
            raise ValueError(f"limit must be None with a function as activation, which clips by itself, got {limit}")
        return composed_ffn(x, weights, plan, given, activation=activation, fused_gate=fused_gate, recompute=recompute)
    arguments: dict[str, Any] = {}
    for name, projection in given.items():
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
        fused_gate=fused_gate,
        recompute=recompute,
    )
    return out


@register_fake("expert_ffn")
def _expert_ffn_fake(x: Tensor, **_: object) -> Tensor:
    return x.new_empty(x.shape)


@register_fake("expert_ffn_forward")
def _expert_ffn_forward_fake(
    x: Tensor, slots: Tensor, recompute: bool = False, **others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    up_width = out_size("up", others)
    width = up_width if others.get("gate") is None else 2 * up_width
    factors = [others.get(f"{name}_a") for name in ("gate", "up", "down")]
    num_rows, rank = 0 if recompute else slots.shape[0], sum(a.shape[2] for a in factors if a is not None)
    return x.new_empty(x.shape), x.new_empty(num_rows, width), x.new_empty(num_rows, rank)


@register_fake("expert_ffn_backward")
def _expert_ffn_backward_fake(output_mask: list[bool], x: Tensor, rows: Tensor, **others: Any) -> list[Tensor]:
    def gradient(wanted: bool, tensor: Tensor | None) -> Tensor:
        if not wanted or tensor is None:
            return x.new_empty(0)
        is_transposed = tensor.dim() == 3 and tensor.stride(1) == 1 and tensor.stride(2) != 1
        return x.new_empty(tensor.mT.shape).mT if is_transposed else x.new_empty(tensor.shape)

    names = [name + field for name in ("gate", "up", "down") for field in ("", "_bias", "_a", "_b")]
    tensors = (x, others.get("weights"), *map(others.get, names))
    gradients = [gradient(wanted, tensor) for wanted, tensor in zip(output_mask, tensors, strict=True)]
    num_slots = rows.shape[0] if output_mask[1] else 0
    gradients[1] = x.new_empty(num_slots, dtype=torch.promote_types(x.dtype, torch.float32))
    return gradients
