"""What ranks send each other: linear maps of rows, each with its transpose, as collectives that run by themselves.

Ranks may hold different numbers of rows, none included. All of them take part in every transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

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
