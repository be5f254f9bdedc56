"""Which rank computes which rows, and which expert weights it needs for them.

Shapes: P ranks, L experts per rank, E = P * L experts, V pairs of a rank and an expert that it computes, S rows that a
rank sends, R rows that it receives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from maxmoe.nn.windows import Window, rows_within
from maxmoe.parallel.dispatch.expert_moves import Move


@dataclass(frozen=True)
class ComputedRows:
    """Rows of each rank by the rank and the expert that compute them.

    The pairs of a rank and an expert are in the order of the ranks. The experts of a rank are those that it owns, then
    the foreign ones, each in the order of their numbers.

    Args:
        rows: ``(P, V)``, int64 on the host, number of rows that each rank sends to each pair.
        experts: experts that each rank computes.
        num_experts: L.
    """

    rows: Tensor
    experts: tuple[tuple[int, ...], ...]
    num_experts: int

    @classmethod
    def of(cls, rows: Tensor, moves: Sequence[Move]) -> "ComputedRows":
        """Distribute the rows ``(P, E)``, int64 on the host, of each rank for each expert by the moves of experts."""
        num_ranks, num_experts = rows.shape[0], rows.shape[1] // rows.shape[0]
        parts: dict[tuple[int, int], Tensor] = {}
        for expert in {move.expert for move in moves}:
            wanted = {move.rank: move.rows for move in moves if move.expert == expert}
            owner = expert // num_experts
            wanted[owner] = int(rows[:, expert].sum()) - sum(wanted.values())
            for rank, part in _split(rows[:, expert].tolist(), wanted).items():
                parts[rank, expert] = torch.tensor(part)
        experts = tuple(
            (
                *range(rank * num_experts, (rank + 1) * num_experts),
                *sorted(move.expert for move in moves if move.rank == rank),
            )
            for rank in range(num_ranks)
        )
        columns = [parts.get((rank, expert), rows[:, expert]) for rank in range(num_ranks) for expert in experts[rank]]
        return cls(torch.stack(columns, dim=1), experts, num_experts)

    @cached_property
    def _bounds(self) -> list[int]:
        return [0, *accumulate(map(len, self.experts))]

    def of_rank(self, rank: int) -> Tensor:
        """Return the number of rows ``(P, n)`` that each rank sends to each of the n experts of a rank."""
        return self.rows[:, self._bounds[rank] : self._bounds[rank + 1]]

    def within(self, window: Window | None) -> "ComputedRows":
        """Return the rows in a window of the rows of each computing rank, in the order of the sending ranks."""
        if window is None:
            return self
        parts = [self.of_rank(rank) for rank in range(len(self.experts))]
        parts = [rows_within(part.flatten(), window).view_as(part) for part in parts]
        return replace(self, rows=torch.cat(parts, dim=1))

    def loads(self) -> list[int]:
        """Return the number of rows that each rank computes."""
        return [int(self.of_rank(rank).sum()) for rank in range(len(self.experts))]

    def sent(self, rank: int) -> list[int]:
        """Return the number of rows that a rank sends to each rank."""
        return [int(self.of_rank(receiver)[rank].sum()) for receiver in range(len(self.experts))]

    def received(self, rank: int) -> list[int]:
        """Return the number of rows that a rank receives from each rank."""
        counts: list[int] = self.of_rank(rank).sum(1).tolist()
        return counts

    def order(self, rank: int) -> Tensor:
        """Return the order ``(S,)`` in which a rank sends its rows, given that they are sorted by expert."""
        lengths = self.rows[rank]
        by_expert = torch.tensor([expert for experts in self.experts for expert in experts]).argsort(stable=True)
        sorted_lengths = lengths[by_expert]
        starts = torch.empty_like(lengths).scatter(0, by_expert, sorted_lengths.cumsum(0) - sorted_lengths)
        places = lengths.cumsum(0) - lengths
        return (starts - places).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))

    def expert_ids(self, rank: int) -> Tensor:
        """Return the place ``(R, 1)`` among the experts of a rank of the expert of each row that it receives."""
        lengths = self.of_rank(rank)
        return torch.arange(lengths.shape[1]).repeat(lengths.shape[0]).repeat_interleave(lengths.flatten()).unsqueeze(1)

    def foreign(self, rank: int) -> tuple[int, ...]:
        """Return the experts of other ranks that a rank computes."""
        return self.experts[rank][self.num_experts :]

    def borrowed(self, rank: int) -> list[int]:
        """Return the number of experts that each rank lends to a rank."""
        owners = [expert // self.num_experts for expert in self.foreign(rank)]
        return [owners.count(owner) for owner in range(len(self.experts))]

    def lent(self, rank: int) -> list[list[int]]:
        """Return the experts of a rank that each rank computes, numbered from the first expert of the rank."""
        first = rank * self.num_experts
        owned = range(first, first + self.num_experts)
        return [
            [expert - first for expert in self.foreign(receiver) if expert in owned]
            for receiver in range(len(self.experts))
        ]


def _split(rows: list[int], wanted: dict[int, int]) -> dict[int, list[int]]:
    """Distribute the rows ``(P,)`` of each rank for one expert over ranks that compute a `wanted` number of them each.

    Returns the number of rows ``(P,)`` of each rank for each computing rank. A rank keeps as many of its own rows as it
    can.
    """
    left, missing = list(rows), dict(wanted)
    parts = {rank: [0] * len(rows) for rank in wanted}
    own = [(rank, rank) for rank in wanted]
    for rank, source in [*own, *((rank, source) for rank in wanted for source in range(len(rows)))]:
        count = min(left[source], missing[rank])
        parts[rank][source] += count
        left[source] -= count
        missing[rank] -= count
    return parts
