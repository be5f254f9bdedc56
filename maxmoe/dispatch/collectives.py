"""Collectives over rows of tensors, each with its transpose as its backward.

    all_gather_rows             <-> reduce_scatter_rows
    all_gather_replicated_rows  <-> this rank's rows
    ragged_all_to_all           <-> itself, with the splits exchanged

Ranks may hold different numbers of rows, none included. All of them take part in every call, forward and backward.

Each is started by one autograd function and waited for by another, and so is its backward: what is computed between the
two in the forward overlaps the communication, and so does the backward of the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from maxmoe.dispatch.transfer import AllGather, AllToAll, ReduceScatter, Started, Transfer
from maxmoe.nn.dispatcher import Pending
from maxmoe.sharding.not_compiled import not_compiled


def start_transfer(rows: Tensor, way: Transfer) -> Pending[Tensor]:
    """Start to send rows.

    Args:
        rows: ``(N, ...)``, of this rank.
        way: what this rank sends, and receives.

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
    return start_transfer(rows, AllGather(group, tuple(counts)))


def all_gather_replicated_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Pending[Tensor]:
    """Gather the rows of all ranks, which all go on with the same: the backward takes this rank's part of the gradient.

    Args:
        rows: ``(N, ...)``, of this rank.
        counts: N of every rank.
        group: of the ranks.

    Returns:
        ``(sum(counts), ...)``.
    """
    return start_transfer(rows, AllGather(group, tuple(counts), is_replicated=True))


def reduce_scatter_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Pending[Tensor]:
    """Sum rows over the ranks, and give each its own; the backward is `all_gather_rows`.

    Args:
        rows: ``(sum(counts), ...)``, this rank's summand.
        counts: how many rows each rank gets.
        group: of the ranks.

    Returns:
        ``(N, ...)``.
    """
    return start_transfer(rows, ReduceScatter(group, tuple(counts)))


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
    return start_transfer(rows, AllToAll(group, tuple(send), tuple(receive)))
