"""Fused operator that computes the routed experts."""

import torch
from torch import Tensor

from maxmoe.ops._composed_ffn import ActivationFunction, composed_ffn
from maxmoe.ops._fake import register_fake
from maxmoe.ops._low_rank import LowRankFactors, operands
from maxmoe.ops._quantized import weights_of
from maxmoe.ops.ragged_plan import RaggedPlan


def expert_ffn(
    x: Tensor,
    weights: Tensor | None,
    plan: RaggedPlan,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_factors: LowRankFactors | None = None,
    up_factors: LowRankFactors | None = None,
    down_factors: LowRankFactors | None = None,
    activation: str | ActivationFunction = "silu",
    limit: float | None = None,
    fused_gate: str | None = None,
    recompute: bool = False,
) -> Tensor:
    """Compute the routed experts: gather, gate and up, activation, down, weighted sum.

    y[t, e] = (f(x[t] gate_e + gate_bias_e) * (x[t] up_e + up_bias_e)) down_e + down_bias_e;
    out[t] = sum_k weights[t, k] * y[t, experts[t, k]]   over the slots that have a row in the plan

    Without `gate`: f(x[t] up_e + up_bias_e) down_e + down_bias_e. With a limit, the gate is first clipped from above,
    and up on both sides. "swigluoai" is gate * sigmoid(1.702 gate) * (up + 1).

    The forward saves x, the pre-activations ``(R, 2F)`` and the plan: D + 2KF elements per token. The gradient of the
    routing weights is <d out[t] down_e^T, f(...)>, so that no expert output is saved.

    With low-rank factors a matrix stands for W + scale * a b. Neither this sum nor its gradient is formed; the rows
    times `a`, which have r columns, are saved as well. A gradient of a matrix is computed only if it is asked for.

    Args:
        x: ``(T, D)``, floating, tokens.
        weights: ``(T, K)``, floating, routing weights; None for ones.
        plan: plan from `ragged_plan`, for L local experts.
        gate: ``(L, D, F)``, dtype of x, gate projections; None for experts without a gate. This and the next two may be
            a `maxmoe.quantization.QuantizedStack`, with blocks along the inputs; the results have the same bits as
            with the dequantized matrices.
        up: ``(L, D, F)``, dtype of x, up projections.
        down: ``(L, F, D)``, dtype of x, down projections.
        gate_bias: ``(L, F)``, dtype of x, or None.
        up_bias: ``(L, F)``, dtype of x, or None.
        down_bias: ``(L, D)``, dtype of x, or None.
        gate_factors: low-rank factors beside `gate`, of any floating dtype, computed in the dtype of x; or None.
        up_factors: low-rank factors beside `up`, or None. With a fused gate, b is ``(L, r, 2F)``.
        down_factors: low-rank factors beside `down`, or None.
        activation: f: "silu", "gelu", "gelu_tanh", "relu", "relu2" or "swigluoai"; or an elementwise function of gate
            ``(R, F)``, None without a gate, and up ``(R, F)`` in the place of f(gate) * up. With a function the experts
            are composed of `ragged_sort`, `gmm` and `ragged_unsort`: the rows, gate, up, what the function saves, its
            result and the outputs are saved.
        limit: limit of the clipping; None for no clipping. Must be None with a function.
        fused_gate: layout of the gate in `up` ``(L, D, 2F)`` and `up_bias` ``(L, 2F)``: "concatenated" if the F columns
            of the gate come before those of up, "interleaved" if they alternate; None if `up` holds no gate.
        recompute: save only x and the plan, and recompute the pre-activations in the backward, with bitwise the same
            gradients. The product with down and the sum are not recomputed.

    Returns:
        ``(T, D)``, dtype of x, weighted sum of the outputs over the experts of each token.

    Raises:
        TypeError: if the function returns no tensor.
        ValueError: if it returns another shape or dtype than that of up, or is given with a limit.

    Source: SonicMoE (arXiv:2512.14080) for the choice of saved tensors.
    """
    if callable(activation):
        if limit is not None:
            raise ValueError(f"limit must be None with a function as activation, which clips by itself, got {limit}")
        return composed_ffn(
            x,
            weights,
            plan,
            gate,
            up,
            down,
            biases=(gate_bias, up_bias, down_bias),
            factors=(gate_factors, up_factors, down_factors),
            activation=activation,
            fused_gate=fused_gate,
            recompute=recompute,
        )
    gate_a, gate_b = (None, None) if gate_factors is None else operands(gate_factors, x.dtype, "gate_factors")
    up_a, up_b = (None, None) if up_factors is None else operands(up_factors, x.dtype, "up_factors")
    down_a, down_b = (None, None) if down_factors is None else operands(down_factors, x.dtype, "down_factors")
    out: Tensor = torch.ops.maxmoe.expert_ffn(
        x,
        weights,
        plan.slots,
        plan.rows,
        plan.group_sizes,
        plan.top_k,
        **weights_of(gate=gate, up=up, down=down),
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=down_bias,
        gate_a=gate_a,
        gate_b=gate_b,
        up_a=up_a,
        up_b=up_b,
        down_a=down_a,
        down_b=down_b,
        activation=activation,
        limit=limit,
        fused_gate=fused_gate,
        recompute=recompute,
    )
    return out


@register_fake("expert_ffn")
def _expert_ffn_fake(x: Tensor, *_: object, **__: object) -> Tensor:
    return x.new_empty(x.shape)


@register_fake("expert_ffn_forward")
def _expert_ffn_forward_fake(
    x: Tensor,
    weights: Tensor | None,
    slots: Tensor,
    rows: Tensor,
    group_sizes: Tensor,
    top_k: int,
    gate: Tensor | None,
    up: Tensor,
    *_: object,
    gate_a: Tensor | None = None,
    up_a: Tensor | None = None,
    down_a: Tensor | None = None,
    recompute: bool = False,
    up_format: str | None = None,
    **__: object,
) -> tuple[Tensor, Tensor, Tensor]:
    up_width = up.shape[2 if up_format is None else 1]
    width = up_width if gate is None else 2 * up_width
    rank = sum(0 if a is None else a.shape[2] for a in (gate_a, up_a, down_a))
    num_rows = 0 if recompute else slots.shape[0]
    return x.new_empty(x.shape), x.new_empty(num_rows, width), x.new_empty(num_rows, rank)


@register_fake("expert_ffn_backward")
def _expert_ffn_backward_fake(
    grad_out: Tensor,
    preactivations: Tensor,
    reduced: Tensor,
    output_mask: list[bool],
    x: Tensor,
    weights: Tensor | None,
    slots: Tensor,
    rows: Tensor,
    group_sizes: Tensor,
    top_k: int,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_a: Tensor | None = None,
    gate_b: Tensor | None = None,
    up_a: Tensor | None = None,
    up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    **_: object,
) -> list[Tensor]:
    def gradient(wanted: bool, tensor: Tensor | None) -> Tensor:
        if not wanted or tensor is None:
            return x.new_empty(0)
        is_transposed = tensor.dim() == 3 and tensor.stride(1) == 1 and tensor.stride(2) != 1
        return x.new_empty(tensor.mT.shape).mT if is_transposed else x.new_empty(tensor.shape)

    biases = (gate_bias, up_bias, down_bias)
    tensors = (x, weights, gate, up, down, *biases, gate_a, gate_b, up_a, up_b, down_a, down_b)
    gradients = [gradient(wanted, tensor) for wanted, tensor in zip(output_mask, tensors, strict=True)]
    num_slots = rows.shape[0] if output_mask[1] else 0
    gradients[1] = x.new_empty(num_slots, dtype=torch.promote_types(x.dtype, torch.float32))
    return gradients
