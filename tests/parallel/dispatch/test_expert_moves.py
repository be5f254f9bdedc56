"""The moves of rows between ranks, against their definition and the minimum number of moves."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import networkx
import torch

from maxmoe.parallel.dispatch.computed_rows import ComputedRows
from maxmoe.parallel.dispatch.expert_moves import Move, loads_of, plan_moves
from maxmoe.parallel.dispatch.least_loaded import rows_per_expert


def bound(rows: Sequence[int], num_ranks: int) -> int:
    return max(-(-sum(rows) // num_ranks), int(1.15 * sum(rows) / num_ranks + 1e-9))


def random_rows(generator: random.Random, num_experts: int) -> list[int]:
    """Random rows per expert: nearly even loads, one expert with nearly all rows, experts without rows."""
    shape, scale = generator.choice([0.4, 0.7, 1.5, 8.0]), generator.choice([1, 7, 50])
    return [int(generator.paretovariate(shape) * generator.choice([0, 1, scale])) % 5000 for _ in range(num_experts)]


def cases(number: int, shapes: Sequence[tuple[int, int]]) -> list[tuple[list[int], int]]:
    generator = random.Random(0)
    made = [(random_rows(generator, ranks * count), ranks) for ranks, count in generator.choices(shapes, k=number)]
    return [(rows, ranks) for rows, ranks in made if sum(rows)]


SHAPES = [(ranks, count) for ranks in (1, 2, 3, 4, 7, 8, 16) for count in (1, 2, 3, 8)]


def test_loads_and_moves_are_bounded() -> None:
    """No rank has many more rows than the mean, nor sends or receives more than L + P - 1 experts.

    A move ends in one of three ways. (1) It takes all rows of an expert that has the most rows of its rank, which has
    more rows than the bound: more than 1 / L of the bound, so that fewer than L such moves fit into a rank. (2) It
    fills the receiving rank up to the bound, once. (3) It reduces the sending rank to the bound: once for each of the
    other ranks.
    """
    largest = 0.0
    # The hardest: one rank is empty, and all others are little above the bound.
    hard = [([0] * count + [21] * (6 * count), 7) for count in (1, 2, 3)]
    for rows, num_ranks in cases(1500, SHAPES) + hard:
        moves, count = plan_moves(rows, num_ranks, 0), len(rows) // num_ranks
        assert max(loads_of(rows, num_ranks, moves)) <= bound(rows, num_ranks), rows
        assert moves == plan_moves(tuple(rows), num_ranks, 0)
        assert list(moves) == sorted(moves, key=lambda move: (move.rank, move.expert))
        assert len({(move.expert, move.rank) for move in moves}) == len(moves)
        moved = Counter[int]()
        for move in moves:
            assert move.rows > 0 and move.expert // count != move.rank
            moved[move.expert] += move.rows
        assert all(part <= rows[expert] for expert, part in moved.items())
        of_rank = Counter(move.rank for move in moves) | Counter(move.expert // count for move in moves)
        largest = max(largest, *(number / (count + num_ranks - 1) for number in [0, *of_rank.values()]))
    assert 0.8 < largest <= 1  # cases come close to the bound


def fewest(rows: list[int], num_ranks: int) -> int:
    """The minimum number of moves, by trying all sets of (expert, rank) pairs, the smaller sets first."""
    count, cap, loads = len(rows) // num_ranks, bound(rows, num_ranks), loads_of(rows, num_ranks)
    pairs = [
        (expert, rank)
        for expert, rank in itertools.product(range(len(rows)), range(num_ranks))
        if rows[expert] and loads[expert // count] > cap > loads[rank]
    ]
    for number in itertools.count():
        if any(can_move(rows, loads, cap, count, chosen) for chosen in itertools.combinations(pairs, number)):
            return number
    raise AssertionError


def can_move(rows: list[int], loads: list[int], cap: int, count: int, pairs: tuple[tuple[int, int], ...]) -> bool:
    """Whether rows can move along the pairs until no rank is above the cap: a maximum flow of the surplus."""
    graph = networkx.DiGraph()
    for rank, load in enumerate(loads):
        graph.add_edge("start", f"surplus {rank}", capacity=max(0, load - cap))
        graph.add_edge(f"room {rank}", "end", capacity=max(0, cap - load))
    for expert, rank in pairs:
        graph.add_edge(f"surplus {expert // count}", f"expert {expert}", capacity=rows[expert])
        graph.add_edge(f"expert {expert}", f"room {rank}")
    return networkx.maximum_flow_value(graph, "start", "end") == sum(max(0, load - cap) for load in loads)


def test_as_few_weights_as_possible_are_sent() -> None:
    """Finding the minimum is a packing problem: few plans have one move more than the minimum, none has two."""
    tried = cases(150, [(2, 2), (2, 4), (3, 2), (3, 3), (4, 1), (4, 2), (5, 1)])
    surplus = [len(plan_moves(rows, num_ranks, 0)) - fewest(rows, num_ranks) for rows, num_ranks in tried]
    assert set(surplus) <= {0, 1} and sum(surplus) <= 0.02 * len(surplus)


def test_of_plans_with_as_many_moves_the_most_even_is_taken() -> None:
    assert plan_moves([100, 0], 2, 0) == (Move(0, 1, 50),)
    assert plan_moves([60, 20, 20, 20], 4, 0) == (Move(0, 1, 14), Move(0, 2, 12))  # three for 30 each
    assert plan_moves([57, 43], 2, 0) == ()  # 1.14 of the mean
    assert plan_moves([58, 42], 2, 0) == (Move(0, 1, 8),)


def test_moves_that_take_longer_than_they_save_are_not_made() -> None:
    rows = [400, 0, 0, 0]  # three weights are sent to save 300 rows of the loaded rank
    assert len(plan_moves(rows, 4, 99)) == 3
    assert plan_moves(rows, 4, 100) == ()
    rows = [30, 30, 0]  # two ranks send a weight each to the third one, to save 10 rows
    assert len(plan_moves(rows, 3, 4)) == 2
    assert plan_moves(rows, 3, 5) == ()
    assert rows_per_expert("cpu", torch.float32) == 200  # 3 * 4 bytes of a weight at 100, 6 operations of a row
    assert rows_per_expert("cuda", torch.bfloat16) == rows_per_expert("xpu", torch.bfloat16) == 1000


def test_without_rows_or_with_fewer_rows_than_ranks() -> None:
    assert plan_moves([0, 0], 2, 0) == ()
    assert plan_moves([2, 0, 0], 3, 0) == (Move(0, 1, 1),)


def test_a_rank_keeps_its_own_rows() -> None:
    counts = torch.tensor([[30, 0], [70, 0]])
    computed = ComputedRows.of(counts, (Move(0, 1, 50),))
    assert computed.rows.tolist() == [[30, 0, 0], [20, 0, 50]]
