"""The boundary of a layer of which several ranks compute parts, for the same tokens: tensor parallelism, ep-tp."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from maxmoe.nn.boundary import LayerInputs
from maxmoe.nn.router import Assignment
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.not_compiled import not_compiled
from maxmoe.sharding.redistribute import (
    all_reduce,
    all_reduce_gradient,
    embed_sharding,
    redistribute_local,
    reduce_outputs,
)


@dataclass(frozen=True)
class PartialSums:
    """The `maxmoe.nn.Boundary` of a layer whose output is a sum over ranks: one all-reduce, or a reduce-scatter.

    Args:
        mesh: of the ranks.
        axes: over which every rank has a part of the layer, and the same tokens.
        sum_axes: those of them over which the outputs of the ranks are yet to be summed.
        dropped_axes: those of them over which the ranks drop other slots.
        embed_axes: that shard the hidden dim of the residual stream. The layer takes whole hidden states, hands on
            gradients that are partial over these axes, and returns this rank's part.
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
        """See `maxmoe.nn.Boundary`."""
        router, experts = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
        return LayerInputs(router, experts, experts if self.shared_is_partial else router)

    def assign(self, assignment: Assignment) -> Assignment:
        """See `maxmoe.nn.Boundary`."""
        return assignment._replace(weights=all_reduce_gradient(assignment.weights, self.mesh, self.axes))

    @not_compiled
    def leave(self, routed: Tensor, shared: Tensor | None) -> Tensor:
        """See `maxmoe.nn.Boundary`."""
        if shared is None or not self.shared_is_partial:
            hidden_states = reduce_outputs(routed, self.mesh, self.sum_axes, self.embed_axes)
            return (
                hidden_states
                if shared is None
                else hidden_states + reduce_outputs(shared, self.mesh, (), self.embed_axes)
            )
        return reduce_outputs(routed + shared, self.mesh, self.sum_axes, self.embed_axes)

    def all_reduce_dropped(self, dropped: Tensor) -> Tensor:
        """See `maxmoe.nn.Boundary`."""
        return all_reduce(dropped, self.mesh, self.dropped_axes)

    def whole(self, partial: tuple[str, ...] = ()) -> NamedSharding:
        """Return the sharding of tokens ``(T, D)`` that every rank has whole, or a summand of over some axes."""
        return NamedSharding.replicated(self.mesh, 2, partial=partial)

    @property
    def outside(self) -> NamedSharding:
        """The sharding of what the layer returns."""
        return embed_sharding(self.mesh, 2, self.embed_axes)


class _Enter(torch.autograd.Function):
    """The tokens twice: the gradient of the first is the same on every rank, that of the second a summand of it."""

    @staticmethod
    def forward(context: Any, x: Tensor, boundary: PartialSums) -> tuple[Tensor, Tensor]:
        context.boundary = boundary
        return x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(context: Any, of_router: Tensor, of_experts: Tensor) -> tuple[Tensor, None]:
        boundary: PartialSums = context.boundary
        handed_on = boundary.whole(partial=boundary.embed_axes)
        summands = _redistributed(of_experts, boundary.whole(partial=boundary.axes), handed_on)
        return summands + _redistributed(of_router, boundary.whole(), handed_on), None


def _redistributed(local: Tensor, source: NamedSharding, target: NamedSharding) -> Tensor:
    return redistribute_local(local, source, target, grad_source=target, grad_target=source)
