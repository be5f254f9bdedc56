"""The tensor-parallel region of a layer on a mesh: ranks with the same tokens compute parts of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from maxmoe.dispatch.planned_dispatch import PlannedDispatch
from maxmoe.nn.router import TopK
from maxmoe.nn.tensor_parallel_region import LayerInputs
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.not_compiled import not_compiled
from maxmoe.sharding.planned_collective import PlannedCollective, planned_redistribution
from maxmoe.sharding.redistribute import (
    all_reduce,
    all_reduce_gradient,
    embed_sharding,
    redistribute_local,
    reduce_outputs,
    summed,
)


@dataclass(frozen=True)
class PartialSums:
    """The `maxmoe.nn.TensorParallelRegion` of a layer whose output is a sum over ranks.

    The outputs are summed by an all-reduce, or by a reduce-scatter where the residual stream is sharded.

    Args:
        mesh: mesh of the layer.
        axes: axes along which the ranks hold the same tokens and compute parts of the layer.
        sum_axes: those of `axes` over which the outputs are partial sums when the region is left.
        dropped_axes: those of `axes` along which the ranks drop different slots.
        embed_axes: axes that shard the hidden dim of the residual stream. The layer takes whole hidden states, returns
            this rank's part, and its input gradient is partial over these axes.
        shared_is_partial: whether the shared experts are computed in parts over `sum_axes` too: one reduction for both.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    sum_axes: tuple[str, ...]
    dropped_axes: tuple[str, ...] = ()
    embed_axes: tuple[str, ...] = ()
    shared_is_partial: bool = False

    @not_compiled
    def enter(self, x: Tensor) -> LayerInputs:
        """Return x twice or thrice; the gradients of the parts are summed in the backward."""
        router, experts = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
        return LayerInputs(router, experts, experts if self.shared_is_partial else router)

    def assign(self, top_k: TopK) -> TopK:
        """Return ids and weights; the gradient of the weights is all-reduced over `axes`."""
        return top_k._replace(weights=all_reduce_gradient(top_k.weights, self.mesh, self.axes))

    @not_compiled
    def leave(self, routed: Tensor, shared: Tensor | None) -> Tensor:
        """Sum the outputs over `sum_axes`, and keep this rank's part of the hidden dim."""
        if shared is None or not self.shared_is_partial:
            hidden_states = reduce_outputs(routed, self.mesh, self.sum_axes, self.embed_axes)
            return (
                hidden_states
                if shared is None
                else hidden_states + reduce_outputs(shared, self.mesh, (), self.embed_axes)
            )
        return reduce_outputs(routed + shared, self.mesh, self.sum_axes, self.embed_axes)

    def all_reduce_dropped(self, dropped: Tensor) -> Tensor:
        """All-reduce the number of dropped slots."""
        return all_reduce(dropped, self.mesh, self.dropped_axes)

    def whole(self, partial: tuple[str, ...] = ()) -> NamedSharding:
        """Return the sharding of tokens ``(T, D)`` that every rank has whole, or a summand of over some axes."""
        return NamedSharding.replicated(self.mesh, 2, partial=partial)

    @property
    def outside(self) -> NamedSharding:
        """The sharding of what the layer returns."""
        return embed_sharding(self.mesh, 2, self.embed_axes)

    def planned_collectives(self, tokens: PlannedDispatch) -> Iterator[PlannedCollective]:
        """List the collectives of a training step at the boundary of the layer."""
        shape, outputs = (tokens.num_tokens, tokens.config.hidden_size), (self.whole(self.sum_axes), self.outside)
        slots, weights = (tokens.num_tokens, tokens.config.top_k), summed(self.mesh, 2, self.axes)
        dropped = summed(self.mesh, 0, self.dropped_axes)
        for way in ("forward", "backward") if tokens.is_recomputed else ("forward",):
            yield from planned_redistribution(f"partial outputs, {way}", *outputs, shape, tokens.dtype)
            yield from planned_redistribution(f"dropped slots, {way}", *dropped, (), torch.int64)
        # Shared experts that are not summed with the routed ones leave by themselves.
        num_leaving = 2 if tokens.config.num_shared_experts and not self.shared_is_partial else 1
        left, entered = (self.outside, self.whole()), (self.whole(self.axes), self.whole(self.embed_axes))
        for gradient in (*(left,) * num_leaving, entered):
            yield from planned_redistribution("partial outputs, backward", *gradient, shape, tokens.dtype)
        yield from planned_redistribution("routing weights, backward", *weights, slots, tokens.weights_dtype)


class _Enter(torch.autograd.Function):
    """The tokens twice: the gradient of the first is the same on every rank, that of the second a summand of it."""

    @staticmethod
    def forward(context: Any, x: Tensor, region: PartialSums) -> tuple[Tensor, Tensor]:
        context.region = region
        return x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(context: Any, of_router: Tensor, of_experts: Tensor) -> tuple[Tensor, None]:
        region: PartialSums = context.region
        grad_input = region.whole(partial=region.embed_axes)
        summands = _redistributed(of_experts, region.whole(partial=region.axes), grad_input)
        return summands + _redistributed(of_router, region.whole(), grad_input), None


def _redistributed(local: Tensor, source: NamedSharding, target: NamedSharding) -> Tensor:
    return redistribute_local(local, source, target, grad_source=target, grad_target=source)
