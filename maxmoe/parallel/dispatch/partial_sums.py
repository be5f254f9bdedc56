"""The tensor-parallel region of a layer on a mesh: ranks with the same tokens compute parts of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from maxmoe.nn.dispatcher import LayerInputs, TensorParallelRegion, sum_of
from maxmoe.nn.routing import TopK
from maxmoe.parallel.dispatch.planned_dispatch import PlannedDispatch
from maxmoe.parallel.dispatch.routed_alike import check_routed_alike, checksum_of_ids
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding, PartitionSpec
from maxmoe.sharding.not_compiled import not_compiled
from maxmoe.sharding.planned_collective import PlannedCollective, planned_redistribution
from maxmoe.sharding.redistribute import Redistribution, redistribute_local


@dataclass(frozen=True)
class PartialSums(TensorParallelRegion):
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
        """Return ids and weights; the gradient of the weights is all-reduced over `axes`.

        In this collective the backward compares the ids of the ranks, and raises if they differ.
        """
        if not self.axes or not top_k.weights.requires_grad:
            return top_k
        weights = _Assign.apply(top_k.weights, checksum_of_ids(top_k.experts), self)  # type: ignore[no-untyped-call]
        return top_k._replace(weights=weights)

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
    def num_ranks(self) -> int:
        """Number of ranks along `axes`."""
        return self.mesh.size(*self.axes)

    @property
    def rank(self) -> int:
        """Number of this rank among the ranks along `axes`."""
        (part,) = NamedSharding(self.mesh, PartitionSpec(self.axes)).slices((self.num_ranks,))
        return int(part.start)

    @property
    def grad_weights(self) -> Redistribution:
        """Redistribution of routing weights ``(T * K,)`` and a checksum of each rank."""
        return Redistribution.reduce_gradient(self.mesh, 1, self.axes)

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
        shape, slots = (tokens.num_tokens, config.hidden_size), (tokens.num_slots + self.num_ranks,)
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
        yield from planned_redistribution("routing weights", self.grad_weights, slots, tokens.weights_dtype)


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


class _Assign(torch.autograd.Function):
    """Return routing weights ``(T, K)``; the backward all-reduces their gradient and compares checksums of the ids."""

    @staticmethod
    def forward(context: Any, weights: Tensor, checksum: Tensor, region: PartialSums) -> Tensor:
        context.checksum, context.region = checksum, region
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        region: PartialSums = context.region
        checksums = gradient.new_zeros(region.num_ranks)
        checksums[region.rank] = context.checksum
        packed = torch.cat([gradient.flatten(), checksums])
        summed = redistribute_local(
            packed, Redistribution(*reversed(region.grad_weights)), "gradient of routing weights"
        )
        of_slots, checksums = torch.split(summed, [gradient.numel(), region.num_ranks])
        check_routed_alike(checksums.unsqueeze(1))
        return of_slots.view_as(gradient), None, None
