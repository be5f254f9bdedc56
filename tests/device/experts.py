"""Inputs of experts, drawn on a device, and the implementations that are compared."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from benchmarks.shapes import Shape
from maxmoe import ops

Results = dict[str, Tensor]


class Problem(NamedTuple):
    """Tokens, their routing, the weights of the experts and the gradient of the output.

    Attributes:
        x: ``(T, D)``.
        weights: ``(T, K)``, float32 or wider.
        experts: ``(T, K)``, int64.
        gate: ``(E, D, F)``.
        up: ``(E, D, F)``.
        gate_up: ``(E, D, 2 F)``, gate and up in one matrix.
        down: ``(E, F, D)``.
        gradient: ``(T, D)``.
    """

    x: Tensor
    weights: Tensor
    experts: Tensor
    gate: Tensor
    up: Tensor
    gate_up: Tensor
    down: Tensor
    gradient: Tensor

    def to_host(self) -> "Problem":
        """Return the same values on the CPU, in float64."""
        return Problem(*(tensor.cpu() if tensor is self.experts else tensor.cpu().double() for tensor in self))


def draw(shape: Shape, dtype: torch.dtype, device: torch.device, skew: float = 0.0) -> Problem:
    """Draw a problem. With a skew, the logits of each expert are lower by it than the logits of the one before."""
    T, D, F, E, K = shape
    on_host = torch.Generator().manual_seed(0)
    experts = (torch.randn(T, E, generator=on_host) - skew * torch.arange(E)).topk(K, 1).indices
    weights = torch.rand(T, K, generator=on_host).to(torch.promote_types(dtype, torch.float32))
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype)

    gate, up, down = normal(E, D, F) / D**0.5, normal(E, D, F) / D**0.5, normal(E, F, D) / F**0.5
    gate_up = torch.cat([gate, up], 2)
    return Problem(normal(T, D), weights.to(device), experts.to(device), gate, up, gate_up, down, normal(T, D))


def _step(outputs: Callable[..., Tensor], leaves: Results, gradient: Tensor | None) -> Results:
    leaves = {name: leaf.detach().requires_grad_(gradient is not None) for name, leaf in leaves.items()}
    out = outputs(**leaves)
    if gradient is not None:
        out.backward(gradient)
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


def ours(problem: Problem, *, backward: bool) -> Results:
    """Plan and experts as in a layer, with separate gate and up."""
    x, weights, experts, gate, up, _, down, gradient = problem

    def outputs(x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        plan = ops.ragged_plan(experts, len(down), num_rows=experts.numel())
        return ops.expert_ffn(x, weights, plan, gate, up, down)

    leaves = {"x": x, "weights": weights, "gate": gate, "up": up, "down": down}
    return _step(outputs, leaves, gradient if backward else None)


def ours_through_aten(problem: Problem, *, backward: bool) -> Results:
    """The same without the CUDA kernels of maxmoe."""
    with ops.force_aten():
        return ours(problem, backward=backward)


def ours_fused(problem: Problem, *, backward: bool) -> Results:
    """The same with gate and up in one matrix."""
    x, weights, experts, _, _, gate_up, down, gradient = problem

    def outputs(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        plan = ops.ragged_plan(experts, len(down), num_rows=experts.numel())
        return ops.expert_ffn(x, weights, plan, None, gate_up, down, fused_gate="concatenated")

    leaves = {"x": x, "weights": weights, "gate_up": gate_up, "down": down}
    return _step(outputs, leaves, gradient if backward else None)


def by_hand(problem: Problem, *, backward: bool) -> Results:
    """`grouped_mm` as one would write it: sort, gather, one product for gate and up, one for down, `index_add`.

    On a GPU `index_add` is atomic: its bits differ from run to run.
    """

    def summed(rows: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, slots // problem.experts.shape[1], rows)

    return _by_hand(problem, summed, backward)


def by_hand_in_order(problem: Problem, *, backward: bool) -> Results:
    """The same, but the rows are gathered in the order of the tokens and summed: repeatable."""

    def summed(rows: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        row_of_slot = torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots), device=slots.device))
        return rows.index_select(0, row_of_slot).unflatten(0, problem.experts.shape).sum(1)

    return _by_hand(problem, summed, backward)


def _by_hand(problem: Problem, summed: Callable[[Tensor, Tensor, Tensor], Tensor], backward: bool) -> Results:
    x, weights, experts, _, _, gate_up, down, gradient = problem

    def outputs(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        expert_of_slot = experts.flatten()
        slots = expert_of_slot.argsort(stable=True)
        local = torch.arange(len(down), device=slots.device)
        ends = torch.searchsorted(expert_of_slot[slots], local, right=True).int()  # bincount would wait for the device
        gate, up = grouped_mm(x.index_select(0, slots // experts.shape[1]), gate_up, offs=ends).chunk(2, 1)
        rows = grouped_mm(silu(gate) * up, down, offs=ends)
        return summed(rows * weights.flatten().index_select(0, slots).unsqueeze(1), x, slots)

    leaves = {"x": x, "weights": weights.to(x.dtype), "gate_up": gate_up, "down": down}
    return _step(outputs, leaves, gradient if backward else None)


CONTENDERS: dict[str, Callable[..., Results]] = {
    "ours": ours,
    "ours, through ATen": ours_through_aten,
    "ours, gate and up in one": ours_fused,
    "grouped_mm by hand": by_hand,
    "grouped_mm by hand, in order": by_hand_in_order,
}
