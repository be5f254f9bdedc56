"""Collectives over rows of tensors, each with its transpose as its backward.

    all_gather_rows             <-> reduce_scatter_rows
    all_gather_replicated_rows  <-> this rank's rows
    ragged_all_to_all           <-> itself, with the splits exchanged

Ranks may hold different numbers of rows, none included. All of them take part in every call, forward and backward.

Each is started by one autograd function and waited for by another, and so is its backward: what is computed between the
two in the forward overlaps the communication, and so does the backward of the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from maxmoe.nn.dispatcher import Pending
from maxmoe.sharding.not_compiled import not_compiled

# Older versions of torch have the second name only, newer ones warn of it.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Transfer(Protocol):
    """A linear map of the rows of all ranks to rows of all ranks."""

    def start(self, rows: Tensor) -> "Started":
        """Begin to send this rank's rows.

        Args:
            rows: ``(N, ...)``, contiguous.

        Returns:
            The communication.
        """
        ...

    @property
    def transposed(self) -> "Transfer":
        """The map of the gradient."""
        ...


@dataclass(frozen=True)
class Started:
    """Communication on its way.

    Args:
        result: complete when `finish` has been called.
        work: of torch; None if nothing is communicated.
        received: ``(P, N, ...)``, to be added up into `result`; None if there is nothing to add.
    """

    result: Tensor
    work: dist.Work | None
    received: Tensor | None = None

    def finish(self) -> Tensor:
        """Wait for the result."""
        if self.work is not None:
            self.work.wait()
        if self.received is not None:
            torch.sum(self.received, 0, out=self.result)
        return self.result


@dataclass(frozen=True)
class AllToAll:
    """Every rank sends other rows to every rank.

    Args:
        group: of the ranks.
        send: how many rows this rank sends to each.
        receive: how many it receives from each.
    """

    group: dist.ProcessGroup
    send: tuple[int, ...]
    receive: tuple[int, ...]

    def start(self, rows: Tensor) -> Started:
        """See `Transfer`."""
        result = rows.new_empty(sum(self.receive), *rows.shape[1:])
        return Started(result, _all_to_all(result, rows, self.receive, self.send, self.group))

    @property
    def transposed(self) -> "AllToAll":
        """See `Transfer`."""
        return AllToAll(self.group, self.receive, self.send)


@dataclass(frozen=True)
class AllGather:
    """Every rank gets the rows of all, in the order of the ranks.

    Args:
        group: of the ranks.
        counts: how many rows each rank has.
        is_replicated: whether all ranks go on with the same, so that each has the whole gradient of all rows.
    """

    group: dist.ProcessGroup
    counts: tuple[int, ...]
    is_replicated: bool = False

    def start(self, rows: Tensor) -> Started:
        """See `Transfer`."""
        result = rows.new_empty(sum(self.counts), *rows.shape[1:])
        if len(set(self.counts)) == 1:
            work = all_gather_single(result, rows, group=self.group, async_op=True) if result.numel() else None
            return Started(result, work)
        # No all-gather takes parts of different sizes: the rows go to each rank by themselves, as many bytes.
        num_ranks = len(self.counts)
        copies = torch.cat([rows] * num_ranks)
        work = _all_to_all(result, copies, self.counts, (rows.shape[0],) * num_ranks, self.group)
        return Started(result, work)

    @property
    def transposed(self) -> "ReduceScatter | OwnRows":
        """See `Transfer`."""
        return OwnRows(self.group, self.counts) if self.is_replicated else ReduceScatter(self.group, self.counts)


@dataclass(frozen=True)
class ReduceScatter:
    """Rows that every rank has a summand of: each rank gets the sum of its own.

    Args:
        group: of the ranks.
        counts: how many rows each rank gets.
    """

    group: dist.ProcessGroup
    counts: tuple[int, ...]

    def start(self, rows: Tensor) -> Started:
        """See `Transfer`."""
        num_ranks, count = len(self.counts), self.counts[self.group.rank()]
        result = rows.new_empty(count, *rows.shape[1:])
        # The reduce-scatter of gloo is an all-reduce: it takes two to four times as long as an all-to-all and a sum.
        if len(set(self.counts)) == 1 and dist.get_backend(self.group) != "gloo":
            work = reduce_scatter_single(result, rows, group=self.group, async_op=True) if rows.numel() else None
            return Started(result, work)
        received = rows.new_empty(num_ranks, count, *rows.shape[1:])
        work = _all_to_all(received.flatten(0, 1), rows, (count,) * num_ranks, self.counts, self.group)
        return Started(result, work, received)

    @property
    def transposed(self) -> AllGather:
        """See `Transfer`."""
        return AllGather(self.group, self.counts)


@dataclass(frozen=True)
class OwnRows:
    """Rows that every rank has all of: each keeps its own.

    Args:
        group: of the ranks.
        counts: how many rows each rank keeps.
    """

    group: dist.ProcessGroup
    counts: tuple[int, ...]

    def start(self, rows: Tensor) -> Started:
        """See `Transfer`."""
        rank = self.group.rank()
        return Started(rows.narrow(0, sum(self.counts[:rank]), self.counts[rank]), None)

    @property
    def transposed(self) -> AllGather:
        """See `Transfer`."""
        return AllGather(self.group, self.counts, is_replicated=True)


def _all_to_all(
    output: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
) -> dist.Work | None:
    work: dist.Work | None = dist.all_to_all_single(output, rows, list(receive), list(send), group, async_op=True)
    return work


def transfer(rows: Tensor, way: Transfer) -> Pending[Tensor]:
    """Start to send rows.

    Args:
        rows: ``(N, ...)``, of this rank.
        way: the map, the same on all ranks.

    Returns:
        The rows that come; its gradient takes the transposed way.
    """
    flight = _Flight(way)
    placeholder = _start(rows, flight)
    return lambda: _wait(placeholder, flight)


@not_compiled
def _start(rows: Tensor, flight: "_Flight") -> Tensor:
    placeholder: Tensor = _Start.apply(rows, flight)  # type: ignore[no-untyped-call]
    return placeholder


@not_compiled
def _wait(placeholder: Tensor, flight: "_Flight") -> Tensor:
    result: Tensor = _Wait.apply(placeholder, flight)  # type: ignore[no-untyped-call]
    return result


class _Flight:
    """What the start of a transfer and the wait for it share, in the forward and in the backward."""

    def __init__(self, way: Transfer) -> None:
        self.way = way
        self.forward: Started | None = None
        self.backward: Started | None = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, flight: _Flight) -> Tensor:
        context.flight = flight
        flight.forward = flight.way.start(rows.contiguous())
        # Not the result itself, whose graph would lead back to it: a recomputation may stop before it waits.
        return flight.forward.result.detach()

    @staticmethod
    @once_differentiable
    def backward(context: Any, _gradient: Tensor) -> tuple[Tensor, None]:
        started, context.flight.backward = context.flight.backward, None
        return started.finish(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, placeholder: Tensor, flight: _Flight) -> Tensor:
        context.flight = flight
        assert flight.forward is not None
        flight.forward.finish()
        flight.forward = None
        return placeholder

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        flight: _Flight = context.flight
        flight.backward = flight.way.transposed.start(gradient.contiguous())
        # The gradient of the rows comes from `_Start.backward`; this one keeps what is being sent alive until then.
        return gradient, None


def all_gather_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Pending[Tensor]:
    """Gather the rows of all ranks, in their order; the backward is `reduce_scatter_rows`.

    Args:
        rows: ``(N, ...)``, of this rank.
        counts: N of every rank.
        group: of the ranks.

    Returns:
        ``(sum(counts), ...)``.
    """
    return transfer(rows, AllGather(group, tuple(counts)))


def all_gather_replicated_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Pending[Tensor]:
    """Gather the rows of all ranks, which all go on with the same: the backward takes this rank's part of the gradient.

    Args:
        rows: ``(N, ...)``, of this rank.
        counts: N of every rank.
        group: of the ranks.

    Returns:
        ``(sum(counts), ...)``.
    """
    return transfer(rows, AllGather(group, tuple(counts), is_replicated=True))


def reduce_scatter_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Pending[Tensor]:
    """Sum rows over the ranks, and give each its own; the backward is `all_gather_rows`.

    Args:
        rows: ``(sum(counts), ...)``, this rank's summand.
        counts: how many rows each rank gets.
        group: of the ranks.

    Returns:
        ``(N, ...)``.
    """
    return transfer(rows, ReduceScatter(group, tuple(counts)))


def ragged_all_to_all(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Pending[Tensor]:
    """Send other rows to every rank; the backward is the same with `send` and `receive` exchanged.

    Args:
        rows: ``(sum(send), ...)``, first those for the first rank of the group.
        send: how many go to each rank.
        receive: how many come from each rank.
        group: of the ranks.

    Returns:
        ``(sum(receive), ...)``, first those from the first rank.

    Raises:
        ValueError: if there are not `sum(send)` rows, or not as many counts as ranks.

    Source: `jax.lax.ragged_all_to_all`.
    """
    num_ranks = group.size()
    if len(send) != num_ranks or len(receive) != num_ranks:
        raise ValueError(
            f"ragged_all_to_all: send and receive must have one count for each of {num_ranks} ranks, "
            f"got {len(send)} and {len(receive)}"
        )
    if rows.shape[0] != sum(send):
        raise ValueError(f"ragged_all_to_all: rows must have sum(send) = {sum(send)} rows, got {rows.shape[0]}")
    return transfer(rows, AllToAll(group, tuple(send), tuple(receive)))
