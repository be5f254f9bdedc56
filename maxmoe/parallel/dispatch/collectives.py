"""Collectives over rows of tensors, each with its adjoint as its backward.

    all_gather_rows   <-> reduce_scatter_rows
    ragged_all_to_all <-> ragged_all_to_all with the splits swapped

Ranks may hold different numbers of rows, none included. All ranks of the group take part in every call, in the forward
and in the backward.

Each collective is asynchronous. One autograd function starts it and another one waits for it, in the forward and in the
backward. Computation between the two overlaps with the communication, and so does its backward.

`all_gather_counts` tells every rank how many rows the others have, before rows are communicated.

Shapes: N rows of this rank, P ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from maxmoe._torch import never_compiled, process_group_named
from maxmoe.nn.dispatcher import Future
from maxmoe.ranks.named_collectives import all_gather, all_to_all, reduce_scatter


@dataclass(frozen=True)
class CollectiveHandle:
    """A collective in flight.

    Args:
        result: output, complete after `wait`.
        work: handle of torch; None if nothing is communicated.
        received: ``(P, N, ...)``, summands of `result`, which `wait` adds up; None if there are none.
    """

    result: Tensor
    work: dist.Work | None
    received: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the result."""
        if self.work is not None:
            self.work.wait()
        if self.received is not None:
            torch.sum(self.received, 0, out=self.result)
        return self.result


@dataclass(frozen=True)
class AllToAll:
    """Every rank sends different rows to each rank: `send[p]` rows to rank p, `receive[p]` rows from it."""

    group: dist.ProcessGroup
    send: tuple[int, ...]
    receive: tuple[int, ...]
    what: str

    def start(self, rows: Tensor) -> CollectiveHandle:
        """Start an all-to-all: ``(sum(send), ...)`` to ``(sum(receive), ...)``."""
        result = rows.new_empty(sum(self.receive), *rows.shape[1:])
        work = all_to_all(result, rows, list(self.receive), list(self.send), self.what, group=self.group)
        return CollectiveHandle(result, work)

    @property
    def adjoint(self) -> "AllToAll":
        """The all-to-all in the opposite direction."""
        return AllToAll(self.group, self.receive, self.send, self.what)


@dataclass(frozen=True)
class AllGather:
    """Every rank gets the rows of all ranks, in the order of the ranks; `counts` is N of every rank."""

    group: dist.ProcessGroup
    counts: tuple[int, ...]
    what: str

    def start(self, rows: Tensor) -> CollectiveHandle:
        """Start an all-gather: ``(N, ...)`` to ``(sum(counts), ...)``."""
        num_ranks = len(self.counts)
        if len(set(self.counts)) > 1:
            # All-gathers need tensors of equal size. An all-to-all of copies sends the same number of bytes.
            copies = torch.cat([rows] * num_ranks)
            return AllToAll(self.group, (rows.shape[0],) * num_ranks, self.counts, self.what).start(copies)
        result = rows.new_empty(sum(self.counts), *rows.shape[1:])
        work = all_gather(result, rows, self.what, group=self.group, is_async=True) if result.numel() else None
        return CollectiveHandle(result, work)

    @property
    def adjoint(self) -> "ReduceScatter":
        """A reduce-scatter."""
        return ReduceScatter(self.group, self.counts, self.what)


@dataclass(frozen=True)
class ReduceScatter:
    """Rows that are summed over the ranks; rank p gets the sum of its `counts[p]` rows."""

    group: dist.ProcessGroup
    counts: tuple[int, ...]
    what: str

    def start(self, rows: Tensor) -> CollectiveHandle:
        """Start a reduce-scatter: ``(sum(counts), ...)`` to ``(N, ...)``."""
        num_ranks, count = len(self.counts), self.counts[self.group.rank()]
        result = rows.new_empty(count, *rows.shape[1:])
        # The reduce-scatter of gloo is an all-reduce: it takes two to four times as long as an all-to-all and a sum.
        if len(set(self.counts)) == 1 and dist.get_backend(self.group) != "gloo":
            work = reduce_scatter(result, rows, self.what, group=self.group, is_async=True) if rows.numel() else None
            return CollectiveHandle(result, work)
        sent = AllToAll(self.group, self.counts, (count,) * num_ranks, self.what).start(rows)
        return CollectiveHandle(result, sent.work, sent.result.view(num_ranks, count, *rows.shape[1:]))

    @property
    def adjoint(self) -> AllGather:
        """An all-gather."""
        return AllGather(self.group, self.counts, self.what)


# Linear map of the rows of all ranks to rows of all ranks. `start` takes the contiguous rows ``(N, ...)`` of this rank;
# `adjoint` maps the gradient of the result to the gradient of the rows.
RowCollective: TypeAlias = AllToAll | AllGather | ReduceScatter


def start_collective(rows: Tensor, collective: RowCollective) -> Future[Tensor]:
    """Start a collective; return the function that waits for its result.

    `_Start.forward` starts the collective and `_Wait.forward` waits for it. `_Wait.backward` starts its adjoint and
    `_Start.backward` waits for it.
    """
    handles = _Handles(collective)
    placeholder = _apply(_Start, rows, handles)
    return lambda: _apply(_Wait, placeholder, handles)


@never_compiled
def _apply(function: Any, rows: Tensor, handles: "_Handles") -> Tensor:
    result: Tensor = function.apply(rows, handles)
    return result


@dataclass
class _Handles:
    """The handles of a collective in the forward and of its adjoint in the backward, while they run."""

    collective: RowCollective
    forward: CollectiveHandle | None = None
    backward: CollectiveHandle | None = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, handles: _Handles) -> Tensor:
        context.handles = handles
        handles.forward = handles.collective.start(rows.contiguous())
        # Detached: the result and its graph would be a reference cycle if a recomputation stops before `wait`.
        return handles.forward.result.detach()

    @staticmethod
    @once_differentiable
    def backward(context: Any, _gradient: Tensor) -> tuple[Tensor, None]:
        handle, context.handles.backward = context.handles.backward, None
        return handle.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, placeholder: Tensor, handles: _Handles) -> Tensor:
        context.handles = handles
        assert handles.forward is not None
        handles.forward.wait()
        handles.forward = None
        return placeholder

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        handles: _Handles = context.handles
        handles.backward = handles.collective.adjoint.start(gradient.contiguous())
        # `_Start.backward` returns the gradient of the rows. This return value keeps the tensor that is sent alive.
        return gradient, None


def all_gather_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup, what: str) -> Future[Tensor]:
    """All-gather ``(N, ...)`` to ``(sum(counts), ...)``; the backward is a reduce-scatter.

    Args:
        rows: ``(N, ...)``, rows of this rank.
        counts: N of every rank.
        group: the ranks.
        what: name of what is communicated, for errors and costs.

    Returns:
        A function that waits for ``(sum(counts), ...)``, the rows in the order of the ranks.
    """
    return start_collective(rows, AllGather(group, tuple(counts), what))


def reduce_scatter_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup, what: str) -> Future[Tensor]:
    """Reduce-scatter ``(sum(counts), ...)`` to ``(N, ...)``; the backward is an all-gather.

    Args:
        rows: ``(sum(counts), ...)``, summand of this rank.
        counts: number of rows that each rank gets.
        group: the ranks.
        what: name of what is communicated, for errors and costs.

    Returns:
        A function that waits for ``(N, ...)``, the sum of this rank's rows.
    """
    return start_collective(rows, ReduceScatter(group, tuple(counts), what))


def ragged_all_to_all(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup, what: str
) -> Future[Tensor]:
    """Send different rows to each rank; the backward is the same with `send` and `receive` swapped.

    Args:
        rows: ``(sum(send), ...)``, ordered by the rank of the group that receives them.
        send: number of rows for each rank.
        receive: number of rows from each rank.
        group: the ranks.
        what: name of what is communicated, for errors and costs.

    Returns:
        A function that waits for ``(sum(receive), ...)``, ordered by the rank that sent the rows.

    Raises:
        ValueError: if `rows` does not have `sum(send)` rows, or the number of counts is not P.

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
    return start_collective(rows, AllToAll(group, tuple(send), tuple(receive), what))


@torch.library.custom_op("maxmoe_dispatch::all_gather_counts", mutates_args=())
def all_gather_counts(counts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """All-gather row counts ``(n,)`` to ``(P, n)``, on the device of the counts and on the host.

    An operator, so that `maxmoe.keep_routing` keeps its result: a recomputation neither communicates nor synchronizes
    the device again. It takes the name of the group, since operators take no groups.
    """
    group = process_group_named(group_name)
    gathered = counts.new_empty(group.size() * len(counts))
    all_gather(gathered, counts.contiguous(), "row counts", group=group)
    gathered = gathered.view(group.size(), len(counts))
    return gathered, gathered.to("cpu", copy=True)


@all_gather_counts.register_fake
def _(counts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    gathered = counts.new_empty(process_group_named(group_name).size(), len(counts))
    return gathered, torch.empty_like(gathered, device="cpu")
