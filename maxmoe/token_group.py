"""Token group: the processes that share the tokens of one forward."""

from collections.abc import Callable, Iterator
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


class ContinuedSequences(LocalTokens):
    """Token group of a module that is called with one part of its sequences after the other, in a single process.

    `all_gather_sequence` returns a part with those of all earlier calls, so that attention has a cache of keys and
    values. A module gathers the same tensors, in the same order, after asking for the first position in every call.

    Args:
        max_length: largest length of the sequences.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length, self._length, self._num_gathered = max_length, 0, 0
        self._gathered: list[Tensor] = []

    def first_position(self, length: int) -> int:
        """Return the number of tokens of all earlier calls."""
        start, self._num_gathered = self._length, 0
        self._length += length
        return start

    def all_gather_sequence(self, part: Tensor, dim: int) -> Tensor:
        """Return the sequences so far."""
        if self._num_gathered == len(self._gathered):
            shape = (*part.shape[:dim], self._max_length, *part.shape[dim + 1 :])
            self._gathered.append(part.new_empty(shape))
        whole = self._gathered[self._num_gathered]
        self._num_gathered += 1
        whole.narrow(dim, self._length - part.shape[dim], part.shape[dim]).copy_(part)
        return whole.narrow(dim, 0, self._length)


@dataclass(frozen=True)
class FlattenedBatch:
    """Token reductions that treat the whole batch as one sequence."""

    tokens: TokenReductions

    def all_reduce_sequence(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """Sum over the processes with the same sequences, then over those with different sequences."""
        return self.tokens.all_reduce_batch(*self.tokens.all_reduce_sequence(*summands))

    def all_reduce_batch(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """Return the summands unchanged, because there is only one sequence."""
        return summands


@contextmanager
def same_tokens_everywhere(module: nn.Module, group: Callable[[], LocalTokens] = LocalTokens) -> Iterator[None]:
    """Context in which every process passes the same whole batch to `module`; for generation, not for training.

    Args:
        module: module whose token groups are replaced, with those of its descendants.
        group: makes the token group of each of them.
    """
    groups = {child: child.token_group for child in module.modules() if declaration_of(child).uses_token_group}
    try:
        for child in groups:
            child.token_group = group()  # type: ignore[assignment]
        yield
    finally:
        for child, before in groups.items():
            child.token_group = before
