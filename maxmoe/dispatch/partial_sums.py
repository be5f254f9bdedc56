"""The tensor-parallel region of a layer on a mesh: ranks with the same tokens compute parts of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from maxmoe.dispatch.planned_dispatch import PlannedDispatch
from maxmoe.nn.routing import TopK
from maxmoe.nn.tensor_parallel_region import LayerInputs, sum_of
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.not_compiled import not_compiled
from maxmoe.sharding.planned_collective import PlannedCollective, planned_redistribution
from maxmoe.sharding.redistribute import Redistribution, redistribute_local


@dataclass(frozen=True)
class PartialSums:
    """The `maxmoe.nn.TensorParallelRegion` of a layer whose output is a sum over ranks.

    The outputs are summed by an all-reduce, or by a reduce-scatter if the residual stream is sharded.

    Args:
        mesh: mesh of the layer.
        axes: axes along which the ranks hold the same tokens and compute parts of the layer.
        sum_axes: subset of `axes` over which the outputs of the experts are partial sums.
        dropped_axes: subset of `axes` along which the ranks drop different slots.
        embed_axes: axes that shard the hidden dim of the residual stream. The layer takes whole hidden states, returns
            this rank's part, and its input gradient is partial over these axes.
        shared_is_partial: whether the shared experts are computed in parts over `sum_axes` too: one reduction for both.
        routed_is_partial: whether the routed experts return parts of the output; otherwise they are latent, and their
            parts are summed before the projection to the output.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    sum_axes: tuple[str, ...]
    dropped_axes: tuple[str, ...] = ()
    embed_axes: tuple[str, ...] = ()
    shared_is_partial: bool = False
    routed_is_partial: bool = True

    @not_compiled
    def enter(self, x: Tensor) -> LayerInputs:
        """Return x as input of each part of the layer; the backward sums the gradients of the parts."""
        if not self._has_partial_outputs:
            whole = redistribute_local(x, self.grad_input(()), "the tokens of a layer")
            return LayerInputs(whole, whole, whole)
        whole, parts = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
        return LayerInputs(
            whole, parts if self.routed_is_partial else whole, parts if self.shared_is_partial else whole
        )

    @not_compiled
    def assign(self, top_k: TopK) -> TopK:
        """Return ids and weights; the gradient of the weights is all-reduced over `axes`."""
        return top_k._replace(weights=redistribute_local(top_k.weights, self._copied_to_experts, "routing weights"))

    @not_compiled
    def copy_to_experts(self, latent: Tensor) -> Tensor:
        """Return latent rows; their gradient is all-reduced over `axes`."""
        return redistribute_local(latent, self._copied_to_experts, "latent inputs")

    @not_compiled
    def reduce_from_experts(self, latent: Tensor) -> Tensor:
        """All-reduce the outputs of latent experts over `sum_axes`."""
        return redistribute_local(latent, self._latent_outputs, "latent outputs")

    @not_compiled
    def leave(self, routed: Tensor, shared: Tensor | None, whole: Tensor | None = None) -> Tensor:
        """Sum the partial outputs over `sum_axes`, add the whole ones, and keep this rank's part of the hidden dim."""
        parts = [(routed, self.routed_is_partial), (shared, self.shared_is_partial), (whole, False)]
        outputs = []
        for is_partial, axes in ((True, self.sum_axes), (False, ())):
            summands = [part for part, of_ranks in parts if part is not None and of_ranks is is_partial]
            if summands:
                outputs.append(redistribute_local(sum_of(*summands), self._outputs(axes), "outputs of a layer"))
        return sum_of(*outputs)

    @not_compiled
    def all_reduce_dropped(self, dropped: Tensor) -> Tensor:
        """All-reduce the number of dropped slots."""
        return redistribute_local(dropped, self._dropped, "dropped slots")

    @property
    def _copied_to_experts(self) -> Redistribution:
        return Redistribution.reduce_gradient(self.mesh, 2, self.axes)

    @property
    def _latent_outputs(self) -> Redistribution:
        return Redistribution.reduce_outputs(self.mesh, 2, self.sum_axes)

    @property
    def _has_partial_outputs(self) -> bool:
        return self.routed_is_partial or self.shared_is_partial

    @property
    def _dropped(self) -> Redistribution:
        return Redistribution.reduce_outputs(self.mesh, 0, self.dropped_axes)

    def _outputs(self, sum_axes: tuple[str, ...]) -> Redistribution:
        return Redistribution.reduce_outputs(self.mesh, 2, sum_axes, self.embed_axes)

    def grad_input(self, axes: tuple[str, ...]) -> Redistribution:
        """Return the redistribution of tokens ``(T, D)`` whose gradient has a summand on each rank along `axes`."""
        return Redistribution.reduce_gradient(self.mesh, 2, axes, left=self.embed_axes)

    def planned_collectives(self, tokens: PlannedDispatch) -> Iterator[PlannedCollective]:
        """List the collectives of a training step on the inputs and outputs of the layer."""
        config = tokens.config
        shape, slots = (tokens.num_tokens, config.hidden_size), (tokens.num_tokens, config.top_k)
        again = {"is_repeated": tokens.is_recomputed}
        has_whole_shared = config.num_shared_experts > 0 and not self.shared_is_partial
        has_whole_outputs = has_whole_shared or config.has_zero_computation_outputs or not self.routed_is_partial
        for has_outputs, axes in ((self._has_partial_outputs, self.sum_axes), (has_whole_outputs, ())):
            if has_outputs:
                output = self._outputs(axes)
                yield from planned_redistribution("partial outputs", output, shape, tokens.dtype, **again)
        if self._has_partial_outputs:
            yield from planned_redistribution("partial outputs", self.grad_input(self.axes), shape, tokens.dtype)
        if not self.routed_is_partial:
            rows = (tokens.num_tokens, config.row_size)
            yield from planned_redistribution("latent outputs", self._latent_outputs, rows, tokens.dtype, **again)
            yield from planned_redistribution("latent outputs", self._copied_to_experts, rows, tokens.dtype)
        yield from planned_redistribution("dropped slots", self._dropped, (), torch.int64, **again)
        yield from planned_redistribution("routing weights", self._copied_to_experts, slots, tokens.weights_dtype)


class _Enter(torch.autograd.Function):
    """Return the tokens twice: the gradient of the first is equal on all ranks, that of the second is partial."""

    @staticmethod
    def forward(context: Any, x: Tensor, region: PartialSums) -> tuple[Tensor, Tensor]:
        context.region = region
        return x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(context: Any, of_router: Tensor, of_experts: Tensor) -> tuple[Tensor, None]:
        region: PartialSums = context.region
        summands = Redistribution(*reversed(region.grad_input(region.axes)))
        whole = Redistribution(*reversed(region.grad_input(())))
        what = "the gradient of the tokens of a layer"
        return redistribute_local(of_experts, summands, what) + redistribute_local(of_router, whole, what), None
