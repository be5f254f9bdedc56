"""Tensor-parallel region of a layer, in which several processes compute parts of the output for the same tokens."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from maxmoe.nn.routing import TopK


class LayerInputs(NamedTuple):
    """Tokens ``(T, D)`` as input of each part of the layer: equal values whose gradients are reduced differently.

    Attributes:
        router: input of the router, which every process computes whole, so that each has the whole gradient.
        experts: input of the routed experts; every process has a summand of its gradient. With latent experts, input of
            the projection before them, whose gradient is whole.
        shared_experts: input of the shared experts; its gradient is whole or a summand, as the region decides.
    """

    router: Tensor
    experts: Tensor
    shared_experts: Tensor


def sum_of(total: Tensor, *summands: Tensor | None) -> Tensor:
    """Return the sum of a tensor and of the summands that are not None."""
    for summand in summands:
        if summand is not None:
            total = total + summand
    return total


class TensorParallelRegion(Protocol):
    """Interface of regions: communication before and after the parts of a layer that processes compute in parts."""

    def enter(self, x: Tensor) -> LayerInputs:
        """Return the tokens x ``(T, D)`` as input of each part of the layer."""
        ...

    def assign(self, top_k: TopK) -> TopK:
        """Return `top_k`, computed by every process; the gradient of the weights is summed over the processes."""
        ...

    def copy_to_experts(self, latent: Tensor) -> Tensor:
        """Return latent rows ``(T, L)``, computed by every process; their gradient is summed over the processes."""
        ...

    def reduce_from_experts(self, latent: Tensor) -> Tensor:
        """Return the sum over the processes of the outputs ``(T, L)`` of latent experts; every process gets it."""
        ...

    def leave(self, routed: Tensor, shared: Tensor | None, whole: Tensor | None = None) -> Tensor:
        """Return the sum of routed and shared experts over the processes, plus `whole`.

        Args:
            routed: ``(T, D)``, output of the routed experts of this process. With latent experts, output of the
                projection after them, which every process has computed whole.
            shared: ``(T, D)``, output of the shared experts; None for a layer without shared experts.
            whole: ``(T, D)``, summand that every process computes from the input of the router; None for no summand.

        Returns:
            ``(T, D)``, output of the layer; if the residual stream is sharded, this rank's shard of the hidden dim.
        """
        ...

    def all_reduce_dropped(self, dropped: Tensor) -> Tensor:
        """Sum the number ``()`` of dropped slots over the processes that drop different slots."""
        ...


@dataclass(frozen=True)
class LocalRegion:
    """Region of a process that computes the whole layer for its tokens, without communication."""

    def enter(self, x: Tensor) -> LayerInputs:
        """Return x as the input of each part."""
        return LayerInputs(x, x, x)

    def assign(self, top_k: TopK) -> TopK:
        """Return `top_k` unchanged."""
        return top_k

    def copy_to_experts(self, latent: Tensor) -> Tensor:
        """Return the rows unchanged."""
        return latent

    def reduce_from_experts(self, latent: Tensor) -> Tensor:
        """Return the outputs unchanged."""
        return latent

    def leave(self, routed: Tensor, shared: Tensor | None, whole: Tensor | None = None) -> Tensor:
        """Return the sum of all outputs."""
        return sum_of(routed, shared, whole)

    def all_reduce_dropped(self, dropped: Tensor) -> Tensor:
        """Return the number of dropped slots unchanged."""
        return dropped
