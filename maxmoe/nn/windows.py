"""Buffers that bound the rows that a process computes at a time, and windows of rows that fit in them.

Windows divide the rows of the experts, whichever token they belong to. The chunks of tokens of `ExpertRunner` overlap
communication and computation; each may have several windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from maxmoe.config import MoEConfig
from maxmoe.config.moe_config import Overflow
from maxmoe.ops import RaggedPlan

C = TypeVar("C")

PARTS = 2**20  # of one, in which required factors are counted


class Window(NamedTuple):
    """Rows from `start` to `stop` - 1 of each process, in the order in which its experts would compute them."""

    start: int
    stop: int


def before(window: Window | None) -> Window:
    """Return the window of the rows before a window; None is the window of all rows."""
    return Window(0, 0 if window is None else window.start)


@dataclass(frozen=True)
class Windows(Generic[C]):
    """Counts of a chunk of tokens for each window of its rows; one window if they fit in the buffers.

    Args:
        counts: counts of each window.
        required_factor: least factor of a buffer that holds the rows of each process.
    """

    counts: tuple[C, ...]
    required_factor: float


class BufferUse(NamedTuple):
    """How the rows of a call filled the buffers, of the processes that know each other's counts.

    Attributes:
        dropped: ``()``, int64, number of dropped slots.
        required_factor: ``()``, float64, least factor of a buffer that would not have overflowed; None without a buffer
            whose overflow is computed in windows.
        overflowed: ``()``, int64, 1 if rows were computed in several windows, else 0; None likewise.
    """

    dropped: Tensor
    required_factor: Tensor | None = None
    overflowed: Tensor | None = None

    @classmethod
    def of(cls, dropped: Tensor, chunks: Sequence[Windows[Any]]) -> "BufferUse":
        """Return the use of the buffers, given the windows of the chunks that have a buffer."""
        if not chunks:
            return cls(dropped)
        factor = max(chunk.required_factor for chunk in chunks)
        has_windows = any(len(chunk.counts) > 1 for chunk in chunks)
        return cls(dropped, dropped.new_full((), factor, dtype=torch.float64), dropped.new_full((), int(has_windows)))


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
            each window gathers their parameters; None if they have the same counts anyway.
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

    def size(self, mean: int) -> int:
        """Return the number of rows that the buffer holds, given the mean number of rows of a process."""
        return int(mean * self.factor)

    def in_windows(
        self, counts: Sequence[C], rows: Sequence[int], means: Sequence[int], device: torch.device
    ) -> list[Windows[C]]:
        """Restrict the counts of each chunk of tokens to the windows of its rows, if one does not hold them.

        Args:
            counts: named tuples with a field `window`.
            rows: largest number of rows of a process, for each chunk.
            means: mean number of rows of a process, for each chunk.
            device: device of collectives.
        """
        sizes = [max(self.size(mean), 1) for mean in means]
        numbers = [-(-most // size) for most, size in zip(rows, sizes, strict=True)]
        # Rounded up to parts that are exact in floating point, because integers are exchanged.
        parts = [-(-most * PARTS // max(mean, 1)) for most, mean in zip(rows, means, strict=True)]
        if self.agreement is not None:
            agreed = self.agreement([*numbers, *parts], device)
            numbers, parts = agreed[: len(counts)], agreed[len(counts) :]
        chunks = zip(counts, numbers, sizes, parts, strict=True)
        return [Windows(_windows(each, number, size), part / PARTS) for each, number, size, part in chunks]


def _windows(counts: Any, number: int, size: int) -> tuple[Any, ...]:
    if number <= 1:
        return (counts,)
    return tuple(counts._replace(window=Window(index * size, (index + 1) * size)) for index in range(number))


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
