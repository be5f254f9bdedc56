"""Specification of the operators, with the names, arguments and results of `maxmoe.ops`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from maxmoe.config import LimitTarget
from maxmoe.config.components import Activation
from maxmoe.reference.routing import stack, wide


class RaggedPlan(NamedTuple):
    """Slot of each row [R], row of each slot [T*K] or -1, rows per expert [L], and number of dropped slots."""

    slots: Tensor
    rows: Tensor
    group_sizes: Tensor
    dropped: Tensor
    top_k: int


class LowRankFactors(NamedTuple):
    """Low-rank factors a [L, in, r] and b [L, r, out] beside matrices [L, in, out]."""

    a: Tensor
    b: Tensor
    scale: float = 1.0


class Projection(NamedTuple):
    """A matrix of each expert: x -> x (weights + scale * a b) + bias."""

    weights: Tensor
    bias: Tensor | None = None
    factors: LowRankFactors | None = None


def ragged_plan(
    experts: Tensor,
    num_experts: int,
    *,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    max_rows: int | None = None,
) -> RaggedPlan:
    """Assign a row to each slot of the local experts, by expert, then by slot; slots past max_rows are dropped."""
    if num_local_experts is None:
        num_local_experts = num_experts - first_expert
    slots: list[int] = []
    rows = [-1] * experts.numel()
    group_sizes = [0] * num_local_experts
    dropped = 0
    for local_expert in range(num_local_experts):
        for slot, expert in enumerate(experts.flatten().tolist()):
            if expert != first_expert + local_expert:
                continue
            if max_rows is not None and len(slots) == max_rows:
                dropped += 1
                continue
            rows[slot] = len(slots)
            slots.append(slot)
            group_sizes[local_expert] += 1
    return RaggedPlan(
        slots=torch.tensor(slots, dtype=torch.int64),
        rows=torch.tensor(rows, dtype=torch.int64),
        group_sizes=torch.tensor(group_sizes, dtype=torch.int64),
        dropped=torch.tensor(dropped),
        top_k=experts.shape[1],
    )


# Moving rows


def ragged_gather(
    x: Tensor, index: Tensor, weights: Tensor | None = None, *, start: int = 0, end: int | None = None
) -> Tensor:
    """out[i] = weights[i] * x[index[i]] for i in [start, end) where index[i] >= 0, else 0."""
    end = len(index) if end is None else end
    out = [wide(x.new_zeros(x.shape[1])) for _ in index]
    for i in range(start, end):
        if index[i] >= 0:
            out[i] = wide(x[index[i]]) if weights is None else wide(weights[i]) * wide(x[index[i]])
    return stack(out, x, x.shape[1])


def ragged_gather_reduce(
    rows: Tensor,
    index: Tensor,
    group_size: int,
    weights: Tensor | None = None,
    *,
    valid: Tensor | None = None,
) -> Tensor:
    """out[t] = sum of weights[j] * rows[index[j]] over the valid j of group t where index[j] >= 0."""
    out = [wide(rows.new_zeros(rows.shape[1])) for _ in range(len(index) // group_size)]
    for j, source in enumerate(index.tolist()):
        if source >= 0 and (valid is None or valid[j]):
            row = wide(rows[source])
            out[j // group_size] = out[j // group_size] + (row if weights is None else wide(weights[j]) * row)
    return stack(out, rows, rows.shape[1])


def ragged_scatter_add(
    rows: Tensor, index: Tensor, num_rows: int, group_size: int = 1, weights: Tensor | None = None
) -> Tensor:
    """out[n] = sum of weights[j] * rows[j // group_size] over the j where index[j] == n."""
    out = [wide(rows.new_zeros(rows.shape[1])) for _ in range(num_rows)]
    for j, target in enumerate(index.tolist()):
        if target >= 0:
            row = wide(rows[j // group_size])
            out[target] = out[target] + (row if weights is None else wide(weights[j]) * row)
    return stack(out, rows, rows.shape[1])


def ragged_dot(a: Tensor, b: Tensor, index: Tensor, group_size: int = 1) -> Tensor:
    """out[j] = <a[j // group_size], b[index[j]]>, 0 where index[j] < 0; float32 or wider."""
    out = [wide(a.new_zeros(())) for _ in index]
    for j, row in enumerate(index.tolist()):
        if row >= 0:
            out[j] = wide(a[j // group_size]) @ wide(b[row])
    return stack(out, wide(a))


def ragged_sort(x: Tensor, plan: RaggedPlan, weights: Tensor | None = None) -> Tensor:
    """rows[r] = weights.flat[slots[r]] * x[slots[r] // K]."""
    row_weights = None if weights is None else weights.flatten()[plan.slots]
    return ragged_gather(x, plan.slots // plan.top_k, row_weights)


def ragged_unsort(rows: Tensor, plan: RaggedPlan, weights: Tensor | None = None) -> Tensor:
    """out[t] = sum over k of weights[t, k] * rows[plan.rows[t * K + k]], over the slots that have a row."""
    return ragged_gather_reduce(rows, plan.rows, plan.top_k, None if weights is None else weights.flatten())


# Experts


def local_groups(group_sizes: Tensor, num_rows: int, num_local: int, group_offset: int) -> list[int]:
    """Return the group of every row, relative to group_offset; -1 for a row without a local group."""
    groups = [group - group_offset for group, size in enumerate(group_sizes.tolist()) for _ in range(size)]
    return [g if 0 <= g < num_local else -1 for g in groups] + [-1] * (num_rows - len(groups))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """out[t, e] = <x[t], weight[e]> (+ bias[e]), summed in float32, or float64 if x or weight is."""
    sum_dtype = torch.promote_types(wide(x).dtype, wide(weight).dtype)
    products = [weight.to(sum_dtype) @ row.to(sum_dtype) for row in x]
    out = [row if bias is None else row + bias.to(sum_dtype) for row in products]
    return stack(out, x.new_zeros((), dtype=out_dtype or sum_dtype), len(weight))


def merged(projection: Projection | Tensor) -> tuple[Tensor, Tensor | None]:
    """matrices + scale * a @ b, float32 or wider, and the bias."""
    matrices, bias, factors = projection if isinstance(projection, Projection) else Projection(projection)
    if factors is None:
        return matrices, bias
    return wide(matrices) + factors.scale * wide(factors.a) @ wide(factors.b), bias


def gmm(lhs: Tensor, rhs: Projection | Tensor, group_sizes: Tensor, *, group_offset: int = 0) -> Tensor:
    """out[r] = rhs[g](lhs[r]) for the rows r of local group g, 0 for rows of no local group."""
    matrices, bias = merged(rhs)
    out = [wide(lhs.new_zeros(matrices.shape[2])) for _ in lhs]
    for r, g in enumerate(local_groups(group_sizes, len(lhs), len(matrices), group_offset)):
        if g >= 0:
            product = wide(lhs[r]) @ wide(matrices[g])
            out[r] = product if bias is None else product + wide(bias[g])
    return stack(out, lhs, matrices.shape[2])


def tgmm(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, num_local_groups: int, *, group_offset: int = 0) -> Tensor:
    """out[g] = sum over the rows r of local group g of the outer product of lhs[r] and rhs[r]."""
    out = [wide(lhs.new_zeros(lhs.shape[1], rhs.shape[1])) for _ in range(num_local_groups)]
    for r, g in enumerate(local_groups(group_sizes, len(lhs), num_local_groups, group_offset)):
        if g >= 0:
            out[g] = out[g] + torch.outer(wide(lhs[r]), wide(rhs[r]))
    return stack(out, lhs, lhs.shape[1], rhs.shape[1])


def activate(
    gate: Tensor | None,
    up: Tensor,
    *,
    activation: Activation = "silu",
    limit: float | None = None,
    limit_target: LimitTarget = "input",
    gate_softcap: float | None = None,
    up_softcap: float | None = None,
) -> Tensor:
    """activation(gate) * up, or activation(up) without a gate.

    `limit` clips up on both sides, and the gate or activation(gate) above; the softcaps are for "situ" alone.
    """
    inner = up if gate is None else gate
    if limit is not None:
        up = up.clamp(-limit, limit)
        if limit_target == "input":
            inner = inner.clamp(max=limit)
    match activation:
        case "silu":
            active = functional.silu(inner)
        case "gelu":
            active = functional.gelu(inner)
        case "gelu_tanh":
            active = functional.gelu(inner, approximate="tanh")
        case "relu":
            active = functional.relu(inner)
        case "relu2":
            active = functional.relu(inner) ** 2
        case "swigluoai":
            active, up = inner * torch.sigmoid(1.702 * inner), up + 1
        case "situ":
            assert gate_softcap is not None and up_softcap is not None
            active = gate_softcap * torch.tanh(inner / gate_softcap) * torch.sigmoid(inner)
            up = up_softcap * torch.tanh(up / up_softcap)
    if limit is not None and limit_target == "output":
        active = active.clamp(max=limit)
    return active if gate is None else active * up


def feed_forward(x: Tensor, matrices: list[Tensor | None], **activation: Any) -> Tensor:
    """Compute one expert on one token; matrices are gate, up, down and biases, or None; the rest is for `activate`."""

    def project(row: Tensor, matrix: Tensor | None, bias: Tensor | None) -> Tensor:
        assert matrix is not None
        return row @ wide(matrix) if bias is None else row @ wide(matrix) + wide(bias)

    gate, up, down, gate_bias, up_bias, down_bias = matrices
    gate_x = None if gate is None else project(wide(x), gate, gate_bias)
    return project(activate(gate_x, project(wide(x), up, up_bias), **activation), down, down_bias)


def halves(both: Tensor, fused_gate: str) -> tuple[Tensor, Tensor]:
    """Return gate and up of a fused tensor."""
    if fused_gate == "interleaved":
        return both[..., ::2], both[..., 1::2]
    gate, up = both.chunk(2, dim=-1)
    return gate, up


def expert_ffn(
    x: Tensor,
    weights: Tensor | None,
    plan: RaggedPlan,
    gate: Projection | Tensor | None,
    up: Projection | Tensor,
    down: Projection | Tensor,
    *,
    fused_gate: str | None = None,
    **activation: Any,
) -> Tensor:
    """out[t] = sum over k of weights[t, k] * expert(x[t]), over the slots that have a row."""
    gates, gate_bias = (None, None) if gate is None else merged(gate)
    (ups, up_bias), (downs, down_bias) = merged(up), merged(down)
    if fused_gate is not None:
        gates, ups = halves(ups, fused_gate)
        gate_bias, up_bias = (None, None) if up_bias is None else halves(up_bias, fused_gate)
    stacked = (gates, ups, downs, gate_bias, up_bias, down_bias)
    experts = [[None if matrices is None else matrices[e] for matrices in stacked] for e in range(len(ups))]
    expert_of_row = local_groups(plan.group_sizes, len(plan.slots), len(ups), 0)
    out = [wide(x.new_zeros(x.shape[1])) for _ in x]
    for slot, row in enumerate(plan.rows.tolist()):
        if row >= 0:
            t, k = divmod(slot, plan.top_k)
            y = feed_forward(x[t], experts[expert_of_row[row]], **activation)
            out[t] = out[t] + (y if weights is None else wide(weights[t, k]) * y)
    return stack(out, x, x.shape[1])
