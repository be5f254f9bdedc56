"""The region of a layer in which several processes compute parts of the output for the same tokens."""

from typing import NamedTuple, Protocol

from torch import Tensor

from maxmoe.nn.router import TopK


class LayerInputs(NamedTuple):
    """The tokens ``(T, D)``, as each part of the layer takes them: equal values with different gradients.

    Attributes:
        router: every process computes the same from it, and has its whole gradient.
        experts: every process has a summand of its gradient.
        shared_experts: one of the two.
    """

    router: Tensor
    experts: Tensor
    shared_experts: Tensor


class TensorParallelRegion(Protocol):
    """How a layer takes its tokens, and sums the partial outputs of the processes."""

    def enter(self, x: Tensor) -> LayerInputs:
        """Return the tokens x ``(T, D)`` as inputs of the parts of the layer."""
        ...

    def assign(self, top_k: TopK) -> TopK:
        """Return ids and weights that every process has computed; the gradient of the weights is summed over them."""
        ...

    def leave(self, routed: Tensor, shared: Tensor | None) -> Tensor:
        """Return the sum of partial outputs over processes and experts.

        Args:
            routed: ``(T, D)``, output of the routed experts of this process.
            shared: ``(T, D)``, output of the shared experts; None without.

        Returns:
            ``(T, D)``; if the residual stream is sharded, this rank's part of the hidden dim.
        """
        ...

    def all_reduce_dropped(self, dropped: Tensor) -> Tensor:
        """Sum the number ``()`` of dropped slots over the processes that drop different ones."""
        ...


class LocalRegion:
    """The region of one process, which computes the whole layer for its tokens."""

    def enter(self, x: Tensor) -> LayerInputs:
        """Return x three times."""
        return LayerInputs(x, x, x)

    def assign(self, top_k: TopK) -> TopK:
        """Return ids and weights."""
        return top_k

    def leave(self, routed: Tensor, shared: Tensor | None) -> Tensor:
        """Return the sum of routed and shared experts."""
        return routed if shared is None else routed + shared

    def all_reduce_dropped(self, dropped: Tensor) -> Tensor:
        """Return the number of dropped slots."""
        return dropped
