"""Where tokens enter and leave a layer that several processes compute parts of, all for the same tokens."""

from typing import NamedTuple, Protocol

from torch import Tensor

from maxmoe.nn.router import Assignment


class LayerInputs(NamedTuple):
    """The tokens ``(T, D)``, as each part of the layer takes them: the values are the same, the gradients are not.

    Attributes:
        router: every process computes the same from it.
        experts: every process has a summand of its gradient.
        shared_experts: as these need it.
    """

    router: Tensor
    experts: Tensor
    shared_experts: Tensor


class Boundary(Protocol):
    """How a layer takes its tokens, and returns the sum of what the processes make of them."""

    def enter(self, x: Tensor) -> LayerInputs:
        """Take the tokens.

        Args:
            x: ``(T, D)``.

        Returns:
            The inputs of the parts of the layer.
        """
        ...

    def assign(self, assignment: Assignment) -> Assignment:
        """Hand an assignment, which every process has computed, to the experts of each.

        Args:
            assignment: of the tokens.

        Returns:
            The same; every process has a summand of the gradient of its weights.
        """
        ...

    def leave(self, routed: Tensor, shared: Tensor | None) -> Tensor:
        """Return the sum over processes and experts.

        Args:
            routed: ``(T, D)``, of the routed experts of this process.
            shared: ``(T, D)``, of the shared experts, None without.

        Returns:
            ``(T, D)``, or of a residual stream that is sharded this rank's part of the hidden dim.
        """
        ...

    def all_reduce_dropped(self, dropped: Tensor) -> Tensor:
        """Sum the slots that each process has dropped.

        Args:
            dropped: ``()``.

        Returns:
            ``()``.
        """
        ...


class LocalBoundary:
    """One process computes all of the layer for its tokens."""

    def enter(self, x: Tensor) -> LayerInputs:
        """See `Boundary`."""
        return LayerInputs(x, x, x)

    def assign(self, assignment: Assignment) -> Assignment:
        """See `Boundary`."""
        return assignment

    def leave(self, routed: Tensor, shared: Tensor | None) -> Tensor:
        """See `Boundary`."""
        return routed if shared is None else routed + shared

    def all_reduce_dropped(self, dropped: Tensor) -> Tensor:
        """See `Boundary`."""
        return dropped
