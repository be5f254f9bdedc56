"""Buffers that bound the rows that a process computes at a time, and windows of rows that fit in them.

Windows divide the rows of the experts, whichever token they belong to. The chunks of tokens of `ExpertRunner` overlap
communication and computation; each may have several windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from maxmoe.config import MoEConfig
from maxmoe.config.moe_config import Overflow
from maxmoe.ops import RaggedPlan

C = TypeVar("C")


class Window(NamedTuple):
    """Rows from `start` to `stop` - 1 of each process, in the order in which its experts would compute them."""

    start: int
    stop: int


class Windows(tuple[C, ...]):
    """Counts of a chunk of tokens for each window of its rows, if the rows of a process do not fit in its buffer."""

    __slots__ = ()


class Agreement(Protocol):
    """Function that returns the largest value of each number over the processes that must have the same one."""

    def __call__(self, numbers: list[int], device: torch.device) -> list[int]:
        """Return the largest values; `device` is the device of the collective."""
        ...


@dataclass(frozen=True)
class Buffer:
    """Bound on the rows that the experts of a process compute at a time.

    Args:
        factor: size of the buffer, as a multiple of the mean number of rows of a process.
        overflow: what happens with further rows, see `MoEConfig`.
        agreement: function with which processes that compute the same experts agree on the number of windows, because
            each window gathers their parameters; None if the counts at hand are those of all of them.
    """

    factor: float
    overflow: Overflow
    agreement: Agreement | None = None

    @classmethod
    def of(cls, config: MoEConfig, agreement: Agreement | None = None) -> "Buffer | None":
        """Return the buffer of a layer with this config; None for no bound."""
        factor = config.buffer_factor
        return None if factor is None else cls(factor, config.overflow, agreement)

    @property
    def drops(self) -> bool:
        """Whether rows past the bound are dropped."""
        return self.overflow == "drop"

    def in_windows(
        self, counts: Sequence[C], rows: Sequence[int], sizes: Sequence[int], device: torch.device
    ) -> list[C | Windows[C]]:
        """Restrict the counts of each chunk of tokens to the windows of its rows, if one does not hold them.

        Args:
            counts: named tuples with a field `window`.
            rows: largest number of rows of a process, for each chunk.
            sizes: number of rows of the buffer, for each chunk.
            device: device of collectives.
        """
        sizes = [max(size, 1) for size in sizes]
        numbers = [-(-most // size) for most, size in zip(rows, sizes, strict=True)]
        if self.agreement is not None:
            numbers = self.agreement(numbers, device)
        return [
            each if number <= 1 else Windows(_restricted(each, index * size, size) for index in range(number))
            for each, number, size in zip(counts, numbers, sizes, strict=True)
        ]


def _restricted(counts: Any, start: int, size: int) -> Any:
    return counts._replace(window=Window(start, start + size))


def rows_within(rows: Tensor, window: Window | None) -> Tensor:
    """Return how many of the rows ``(N, ...)`` lie in a window, in the order of the first dim; None for all rows."""
    if window is None:
        return rows
    ends = rows.cumsum(0)
    return ends.clamp(*window) - (ends - rows).clamp(*window)


def plan_within(plan: RaggedPlan, window: Window) -> RaggedPlan:
    """Return the plan of the rows in a window."""
    start, stop = window
    return plan._replace(
        slots=plan.slots[start:stop],
        rows=torch.where(plan.rows < stop, plan.rows - start, -1).clamp_min(-1),
        group_sizes=rows_within(plan.group_sizes, window),
    )
