"""What a module says of its parameters, and is told of its tokens, for running on several processes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import TypeVarTuple, Unpack

# Of parameters, by their path within the module: the logical name of each dim, None for one that is never sharded.
LogicalNames: TypeAlias = Mapping[str, tuple[str | None, ...]]
Summands = TypeVarTuple("Summands")


class Activation(NamedTuple):
    """A tensor that a module keeps from its forward to its backward.

    Modules say it in a method ``kept_for_backward(batch, length)`` that returns these by name: each its own tensors and
    its input, children theirs.

    Args:
        shape: for all sequences, wherever they are.
        names: the logical name of each dim.
        dtype: None for that of the parameters.
    """

    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    dtype: torch.dtype | None = None


TOKENS = ("activation_batch", "activation_length")


class TokenSums(Protocol):
    """Sums over the processes that share a forward; each gets the gradient of its own summands.

    Summands are tensors and counts. Those of one call travel in one message, and counts come back as tensors from it.
    """

    def sum_within_sequences(self, *summands: Unpack[Summands]) -> tuple[Unpack[Summands]]:
        """Sum over the processes that hold parts of the same sequences.

        Args:
            *summands: of this process.

        Returns:
            The sum of each, the same in all of them.
        """
        ...

    def sum_across_sequences(self, *summands: Unpack[Summands]) -> tuple[Unpack[Summands]]:
        """Sum over the processes that hold other sequences.

        Args:
            *summands: of this process.

        Returns:
            The sum of each, the same in all of them.
        """
        ...


class TokenLayout(TokenSums, Protocol):
    """What a layer must know of the tokens that other processes hold."""

    def first_position(self, length: int) -> int:
        """Find where in its sequences this process begins.

        Args:
            length: tokens of each sequence that it holds.

        Returns:
            The position of the first of them.
        """
        ...

    def whole_sequence(self, part: Tensor, dim: int) -> Tensor:
        """Gather sequences; each process gets the gradient of its own part.

        Args:
            part: of this process.
            dim: the dim that runs along the sequence.

        Returns:
            All parts, in order.
        """
        ...


class WholeBatch:
    """All tokens are in this process."""

    def sum_within_sequences(self, *summands: Unpack[Summands]) -> tuple[Unpack[Summands]]:
        """See `TokenSums`."""
        return summands

    def sum_across_sequences(self, *summands: Unpack[Summands]) -> tuple[Unpack[Summands]]:
        """See `TokenSums`."""
        return summands

    def first_position(self, length: int) -> int:
        """See `TokenLayout`."""
        return 0

    def whole_sequence(self, part: Tensor, dim: int) -> Tensor:
        """See `TokenLayout`."""
        return part


@dataclass(frozen=True)
class AsOneSequence:
    """The sums of a batch that counts as one sequence."""

    sums: TokenSums

    def sum_within_sequences(self, *summands: Unpack[Summands]) -> tuple[Unpack[Summands]]:
        """See `TokenSums`."""
        return self.sums.sum_across_sequences(*self.sums.sum_within_sequences(*summands))

    def sum_across_sequences(self, *summands: Unpack[Summands]) -> tuple[Unpack[Summands]]:
        """See `TokenSums`."""
        return summands


@contextmanager
def same_tokens_everywhere(module: nn.Module) -> Iterator[None]:
    """In it, every process gives `module` the same whole batch: to generate from it, say, not to train it."""
    layouts = {child: child.token_layout for child in module.modules() if hasattr(child, "token_layout")}
    try:
        for child in layouts:
            child.token_layout = WholeBatch()  # type: ignore[assignment]
        yield
    finally:
        for child, layout in layouts.items():
            child.token_layout = layout
