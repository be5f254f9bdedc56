"""Token group: the processes that share the tokens of one forward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn

from maxmoe._torch.this_thread import OfThisThread


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

    A module that needs it has the attribute `TokenGroupAttribute`.
    """

    def first_position(self, length: int) -> int:
        """Return the position, from 0, of this process's first token in its sequences.

        Args:
            length: number of tokens of each sequence in this process.
        """
        ...

    def numbers(self, num_sequences: int, length: int, device: torch.device) -> Tensor:
        """Return a number ``(B, S)``, int64, for each token of this process, which no token of another process has.

        A single process gives the token the same number. In a pipeline, a token has another number in the stages of
        another rank, whose layers route it by themselves.

        Args:
            num_sequences: B, number of sequences in this process.
            length: S, number of tokens of each sequence in this process.
            device: device of the result.
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

    def numbers(self, num_sequences: int, length: int, device: torch.device) -> Tensor:
        """Return the numbers of B sequences and S positions from 0."""
        return numbers_of_tokens(range(num_sequences), range(length), device)

    def all_gather_sequence(self, part: Tensor, dim: int) -> Tensor:
        """Return the sequences unchanged."""
        return part


def numbers_of_tokens(sequences: range, positions: range, device: torch.device) -> Tensor:
    """Return sequence * 2^32 + position ``(B, S)``, which does not depend on the length of the sequences."""
    first = torch.arange(sequences.start, sequences.stop, device=device).unsqueeze(1) * 2**32
    return first + torch.arange(positions.start, positions.stop, device=device)


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


class TokenGroupAttribute:
    """Attribute of a module that mixes tokens, or sums over them: the token group of its calls.

    `parallelize` sets it to the token group of the mesh. In `same_tokens_everywhere`, it has another value in one
    thread alone::

        class Attention(nn.Module):
            token_group = maxmoe.nn.TokenGroupAttribute()

            def __init__(self):
                super().__init__()
                self.token_group = maxmoe.nn.LocalTokens()
    """

    @overload
    def __get__(self, module: None, kind: type) -> "TokenGroupAttribute": ...

    @overload
    def __get__(self, module: nn.Module, kind: type | None = None) -> TokenGroup: ...

    def __get__(self, module: Any, kind: type | None = None) -> "TokenGroup | TokenGroupAttribute":
        """Return the token group of a module in this thread, or for a class this attribute itself."""
        if module is None:
            return self
        of_this_thread: TokenGroup | None = module.token_group_of_this_thread.value
        of_all_threads: TokenGroup = module.token_group_of_all_threads
        return of_all_threads if of_this_thread is None else of_this_thread

    def __set__(self, module: Any, group: TokenGroup) -> None:
        """Set the token group of all threads."""
        module.token_group_of_all_threads, module.token_group_of_this_thread = group, OfThisThread("token group")


def uses_token_group(module: nn.Module) -> bool:
    """Return whether a module has a token group."""
    return isinstance(getattr(type(module), "token_group", None), TokenGroupAttribute)


@contextmanager
def same_tokens_everywhere(module: nn.Module, group: Callable[[], LocalTokens] = LocalTokens) -> Iterator[None]:
    """Context in which every process passes the same whole batch to `module`; for generation, not for training.

    It applies to the calls of this thread.

    Args:
        module: module whose token groups are replaced, and in its descendants.
        group: makes the token group of each of them.
    """
    with ExitStack() as stack:
        for child in filter(uses_token_group, module.modules()):
            stack.enter_context(child.token_group_of_this_thread.set(group()))  # type: ignore[union-attr,operator]
        yield
