"""Decides which experts are lent to which ranks and for how many rows, so that ranks compute about the same number.

The functions are deterministic and use integers only, so that every rank derives the same plan from the same counts.

Shapes: P ranks, L experts per rank, E = P * L experts, numbered in the order of the ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Bound on the rows of a rank: this percentage of the mean. The plan also tries tighter bounds.
MAX_PERCENT_OF_MEAN = 115
TRIED_PERCENT = (100, 105, 110, MAX_PERCENT_OF_MEAN)


class Move(NamedTuple):
    """Rows that a rank computes with an expert of another rank.

    Attributes:
        expert: number of the expert; its owner is rank ``expert // L``.
        rank: rank that receives the weights of the expert and computes the rows.
        rows: number of rows, at least one.
    """

    expert: int
    rank: int
    rows: int


def plan_moves(rows: Sequence[int], num_ranks: int, rows_per_expert: int) -> tuple[Move, ...]:
    """Plan which experts other ranks compute, and how many of their rows.

    Without moves, every rank computes the rows of its experts. With moves, no rank computes more than
    `MAX_PERCENT_OF_MEAN` of the mean number of rows, rounded down, or the mean rounded up. The rows of an expert may
    be computed on several ranks. The plan with the fewest moves is taken, and of several the one with the smallest
    load.

    Cost model: a step takes as long as the rank with the most rows computes and the rank that sends or receives the
    most experts communicates. Moves are planned only if the first becomes shorter by more than the second::

        (most rows of a rank without moves) - (with moves) > rows_per_expert * (most experts sent or received by a rank)

    Args:
        rows: ``(E,)``, number of rows of each expert over all ranks.
        num_ranks: P.
        rows_per_expert: number of rows that a rank computes in the time in which the weights of one expert are sent.

    Returns:
        Moves in the order of their ranks and experts; none if the moves would take longer than they save.
    """
    mean = -(-sum(rows) // num_ranks)
    caps = dict.fromkeys(max(mean, sum(rows) * percent // (100 * num_ranks)) for percent in TRIED_PERCENT)
    loads = loads_of(rows, num_ranks)
    if max(loads) <= max(caps):
        return ()
    moves = min((_moves_within(rows, num_ranks, cap) for cap in caps), key=len)
    saved = max(loads) - max(loads_of(rows, num_ranks, moves))
    experts_per_rank = len(rows) // num_ranks
    sent = [sum(move.expert // experts_per_rank == rank for move in moves) for rank in range(num_ranks)]
    received = [sum(move.rank == rank for move in moves) for rank in range(num_ranks)]
    return tuple(moves) if saved > rows_per_expert * max(*sent, *received) else ()


def loads_of(rows: Sequence[int], num_ranks: int, moves: Sequence[Move] = ()) -> list[int]:
    """Return the number of rows that each rank computes."""
    experts_per_rank = len(rows) // num_ranks
    loads = [sum(rows[first : first + experts_per_rank]) for first in range(0, len(rows), experts_per_rank)]
    for move in moves:
        loads[move.expert // experts_per_rank] -= move.rows
        loads[move.rank] += move.rows
    return loads


def _moves_within(rows: Sequence[int], num_ranks: int, cap: int) -> list[Move]:
    """Move rows until no rank has more than `cap`, which is at least the mean.

    Repeatedly, the rank with the most rows sends rows of its largest expert: to the rank with the least room among
    those with enough room for all rows that must move, or else to the rank with the most room.
    """
    experts_per_rank = len(rows) // num_ranks
    left, loads = list(rows), loads_of(rows, num_ranks)
    moved: dict[tuple[int, int], int] = {}
    while (most := max(loads)) > cap:
        source = loads.index(most)
        expert = max(range(source * experts_per_rank, (source + 1) * experts_per_rank), key=left.__getitem__)
        wanted = min(most - cap, left[expert])
        fitting = [rank for rank in range(num_ranks) if cap - loads[rank] >= wanted]
        rank = max(fitting, key=loads.__getitem__) if fitting else loads.index(min(loads))
        count = min(wanted, cap - loads[rank])
        left[expert] -= count
        loads[source] -= count
        loads[rank] += count
        moved[rank, expert] = moved.get((rank, expert), 0) + count
    return [Move(expert, rank, count) for (rank, expert), count in sorted(moved.items())]
