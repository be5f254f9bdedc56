"""Token group: the processes that share the tokens of one forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from maxmoe.declaration import declaration_of


class TokenReductions(Protocol):
    """Interface of all-reduces over the processes that share the tokens of a forward.

    Summands are tensors and ints. The summands of a call are reduced in one collective and returned as tensors of their
    shape and dtype; integers are exact below 2^53. An int that is not reduced is returned as an int. The gradient of
    the sum is the gradient of every summand, without a collective in the backward.
    """

    def all_reduce_sequence(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """Sum over the processes that hold parts of the same sequences."""
        ...

    def all_reduce_batch(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """Sum over the processes that hold different sequences."""
        ...


class TokenGroup(TokenReductions, Protocol):
    """Interface to the processes that share the tokens of a forward.

    A module that declares `uses_token_group` has an attribute `token_group`, initially a `LocalTokens`, which
    `parallelize` replaces.
    """

    def first_position(self, length: int) -> int:
        """Return the position, from 0, of this process's first token in its sequences.

        Args:
            length: number of tokens of each sequence in this process.
        """
        ...

    def all_gather_sequence(self, part: Tensor, dim: int) -> Tensor:
        """All-gather sequences in the forward, reduce-scatter their gradients in the backward.

        Args:
            part: tensor with this process's part of the sequences along `dim`.
            dim: index of the sequence dim.
        """
        ...


class LocalTokens:
    """Token group of a single process, which has all tokens. Its methods do not communicate."""

    def all_reduce_sequence(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """Return the summands unchanged."""
        return summands

    def all_reduce_batch(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """Return the summands unchanged."""
        return summands

    def first_position(self, length: int) -> int:
        """Return 0."""
        return 0

    def all_gather_sequence(self, part: Tensor, dim: int) -> Tensor:
        """Return the sequences unchanged."""
        return part


@dataclass(frozen=True)
class FlattenedBatch:
    """Token reductions that treat the whole batch as one sequence."""

    tokens: TokenReductions

    def all_reduce_sequence(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """Sum over all processes: those of the same sequences, then those of different ones."""
        return self.tokens.all_reduce_batch(*self.tokens.all_reduce_sequence(*summands))

    def all_reduce_batch(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """Return the summands unchanged, because there is only one sequence."""
        return summands


@contextmanager
def same_tokens_everywhere(module: nn.Module) -> Iterator[None]:
    """Context in which every process passes the same whole batch to `module`; for generation, not for training.

    The token groups of the module and its descendants are replaced by `LocalTokens`.
    """
    groups = {child: child.token_group for child in module.modules() if declaration_of(child).uses_token_group}
    try:
        for child in groups:
            child.token_group = LocalTokens()  # type: ignore[assignment]
        yield
    finally:
        for child, group in groups.items():
            child.token_group = group
