"""The tokens of one forward, which other processes may hold parts of."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from maxmoe.declaration import declaration_of


class TokenReductions(Protocol):
    """All-reduces over the processes that share a forward.

    Summands are tensors and ints. Those of one call travel in one message, and come back as tensors of their shape and
    dtype; integers stay exact below 2^53. Where nothing is reduced, an int stays one. The gradient of each process's
    summand is the gradient of the sum.
    """

    def all_reduce_sequence(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """Sum over the processes that hold parts of the same sequences.

        Args:
            *summands: of this process.

        Returns:
            The sum of each, the same in all of them.
        """
        ...

    def all_reduce_batch(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """Sum over the processes that hold other sequences.

        Args:
            *summands: of this process.

        Returns:
            The sum of each, the same in all of them.
        """
        ...


class TokenGroup(TokenReductions, Protocol):
    """The processes that share the tokens of a forward, as one layer sees them.

    A layer that declares `uses_token_group` has an attribute `token_group`: `LocalTokens` until `parallelize` sets it.
    """

    def first_position(self, length: int) -> int:
        """Return the position in its sequences of this process's first token.

        Args:
            length: tokens of each sequence that it holds.

        Returns:
            The position.
        """
        ...

    def all_gather_sequence(self, part: Tensor, dim: int) -> Tensor:
        """Gather whole sequences; the gradient of each part is the sum of its gradients over the processes.

        Args:
            part: of this process.
            dim: the dim along the sequence.

        Returns:
            All parts, in order.
        """
        ...


class LocalTokens:
    """All tokens are in this process."""

    def all_reduce_sequence(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """See `TokenReductions`."""
        return summands

    def all_reduce_batch(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """See `TokenReductions`."""
        return summands

    def first_position(self, length: int) -> int:
        """See `TokenGroup`."""
        return 0

    def all_gather_sequence(self, part: Tensor, dim: int) -> Tensor:
        """See `TokenGroup`."""
        return part


@dataclass(frozen=True)
class FlattenedBatch:
    """The reductions of a batch whose tokens count as one sequence."""

    tokens: TokenReductions

    def all_reduce_sequence(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """See `TokenReductions`."""
        return self.tokens.all_reduce_batch(*self.tokens.all_reduce_sequence(*summands))

    def all_reduce_batch(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """See `TokenReductions`."""
        return summands


@contextmanager
def same_tokens_everywhere(module: nn.Module) -> Iterator[None]:
    """In it, every process gives `module` the same whole batch: to generate from it, say, not to train it."""
    groups = {child: child.token_group for child in module.modules() if declaration_of(child).uses_token_group}
    try:
        for child in groups:
            child.token_group = LocalTokens()  # type: ignore[assignment]
        yield
    finally:
        for child, group in groups.items():
            child.token_group = group
