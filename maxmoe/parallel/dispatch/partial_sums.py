"""The tensor-parallel region of a layer on a mesh: ranks with the same tokens compute parts of it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from maxmoe._torch import FakeTensor, assert_async, never_compiled
from maxmoe.nn.dispatcher import LayerInputs, TensorParallelRegion, sum_of
from maxmoe.nn.routing import TopK
from maxmoe.ranks.checksum import weighted_sum
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding, PartitionSpec
from maxmoe.sharding.redistribute import Redistribution, redistribute_local


@dataclass(frozen=True)
class PartialSums(TensorParallelRegion):
    """The `maxmoe.nn.TensorParallelRegion` of a layer whose output is a sum over ranks.

    The outputs are summed by an all-reduce, or by a reduce-scatter if the residual stream is sharded.

    Args:
        axes: axes along which the ranks hold the same tokens and compute parts of the layer.
        dropped_axes: subset of `axes` along which the ranks drop different slots.
        embed_axes: axes that shard the hidden dim of the residual stream. The layer takes whole hidden states, returns
            this rank's part, and its input gradient is partial over these axes.
        shared_is_partial: whether the shared experts are computed in parts over `axes` too: one reduction for both.
        routed_is_partial: whether the routed experts return parts of the output; otherwise their parts are
            summed before what follows them, such as the projection of latent experts.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    dropped_axes: tuple[str, ...] = ()
    embed_axes: tuple[str, ...] = ()
    shared_is_partial: bool = False
    routed_is_partial: bool = True

    @never_compiled
    def enter(self, x: Tensor) -> LayerInputs:
        """Return x as input of each part of the layer; the backward sums the gradients of the parts."""
        what = "the tokens of a layer"
        whole = redistribute_local(x, self.grad_input(()), what) if self.embed_axes else x
        parts = redistribute_local(x, self.grad_input(self.axes), what) if self._has_partial_outputs else whole
        are_partial = (self.routed_is_partial, self.shared_is_partial)
        return LayerInputs(whole, *(parts if is_partial else whole for is_partial in are_partial))

    @never_compiled
    def assign(self, top_k: TopK) -> TopK:
        """Return ids and weights; the gradient of the weights is all-reduced over `axes`.

        In this collective the backward compares the ids of the ranks, and raises if they differ.
        """
        if not self.axes or not top_k.weights.requires_grad:
            return top_k
        weights = _Assign.apply(top_k.weights, weighted_sum(top_k.experts.flatten()), self)  # type: ignore[no-untyped-call]
        return top_k._replace(weights=weights)

    @never_compiled
    def copy_to_experts(self, latent: Tensor) -> Tensor:
        """Return latent rows; their gradient is all-reduced over `axes`."""
        return redistribute_local(latent, self._copied_to_experts, "latent inputs")

    @never_compiled
    def reduce_from_experts(self, latent: Tensor) -> Tensor:
        """All-reduce the outputs of latent experts over `axes`."""
        return redistribute_local(latent, self._latent_outputs, "latent outputs")

    @never_compiled
    def whole_sum(self, routed: Tensor, shared: Tensor | None, whole: Tensor | None = None) -> Tensor:
        """Add the outputs on every rank; the outputs of shared experts may be partial."""
        if shared is not None and self.shared_is_partial:
            shared = self.reduce_from_experts(shared)
        return sum_of(routed, shared, whole)

    @never_compiled
    def leave(self, routed: Tensor, shared: Tensor | None, whole: Tensor | None = None) -> Tensor:
        """Sum the partial outputs over `axes`, add the whole ones, and keep this rank's part of the hidden dim."""
        parts = [(routed, self.routed_is_partial), (shared, self.shared_is_partial), (whole, False)]
        outputs = []
        for is_partial, axes in ((True, self.axes), (False, ())):
            summands = [part for part, of_ranks in parts if part is not None and of_ranks is is_partial]
            if summands:
                outputs.append(redistribute_local(sum_of(*summands), self._outputs(axes), "outputs of a layer"))
        return sum_of(*outputs)

    @never_compiled
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
        return Redistribution.reduce_outputs(self.mesh, 2, self.axes)

    @property
    def _has_partial_outputs(self) -> bool:
        return self.routed_is_partial or self.shared_is_partial

    @property
    def _dropped(self) -> Redistribution:
        return Redistribution.reduce_outputs(self.mesh, 0, self.dropped_axes)

    def _outputs(self, axes: tuple[str, ...]) -> Redistribution:
        return Redistribution.reduce_outputs(self.mesh, 2, axes, self.embed_axes)

    def grad_input(self, axes: tuple[str, ...]) -> Redistribution:
        """Return the redistribution of tokens ``(T, D)`` whose gradient has a summand on each rank along `axes`."""
        return Redistribution.reduce_gradient(self.mesh, 2, axes, left=self.embed_axes)


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
        _check_routed_alike(checksums)
        return of_slots.view_as(gradient), None, None


def _check_routed_alike(checksums: Tensor) -> None:
    """Raise unless the checksums ``(P,)`` of the ids of all ranks are equal.

    On an accelerator, for which the host does not wait, an assertion of the device raises. Fake tensors, with which
    `maxmoe.costs` measures a step, have no values.
    """
    if isinstance(checksums, FakeTensor):
        return
    is_other = checksums.ne(checksums[0])
    if checksums.device.type != "cpu":
        assert_async(~is_other.any(), "ranks that hold the same tokens must route them alike")
    elif is_other.any():
        raise RuntimeError(
            "ranks that hold the same tokens must route them alike, got other experts on the ranks "
            f"{is_other.nonzero()[:, 0].tolist()} of the group than on its rank 0: give them the same tokens and seeds"
        )
