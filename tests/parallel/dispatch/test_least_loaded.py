"""Experts that move to ranks with few rows: their plan, bounds on rows and memory, errors.

test_strategies.py compares numbers.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import maxmoe
from maxmoe import MoE
from maxmoe.parallel import parallelize, token_sharding
from maxmoe.parallel.dispatch import least_loaded
from maxmoe.parallel.dispatch.computed_rows import ComputedRows
from maxmoe.parallel.dispatch.expert_moves import Move, loads_of, plan_moves
from maxmoe.parallel.dispatch.least_loaded import rows_per_expert
from maxmoe.parallel.dispatch.lent_experts import LentExperts
from maxmoe.sharding import LogicalRules, Mesh
from support.dispatched_layer import FAMILIES, LOADS, NUM_EXPERTS, Batch, make_batch, make_layer, take_step
from support.memory import num_bytes, saved_for_backward
from support.moved_experts import free_moves
from support.run_ranks import fake_rank, run_ranks
from support.slow_cases import by_default

EP = LogicalRules.load("ep-as-dp")
HOT = "three quarters to one expert"


@dataclass
class Computed:
    """Rows and foreign experts that a rank computes in a step; -1 foreign experts if no expert moves."""

    own: int
    foreign: int = 0
    num_foreign: int = -1


def spy(layer: MoE) -> list[Computed]:
    """Return a list that collects the rows of the rank in each forward of the experts."""
    computed: list[Computed] = []

    def note(_: object, arguments: tuple[Any, ...]) -> None:
        _, _, plan, *foreign = arguments
        computed.append(Computed(len(plan.slots)))
        for lent in foreign:
            assert isinstance(lent, LentExperts)
            computed[-1] = Computed(len(plan.slots), len(lent.plan.slots), sum(lent.receive))

    layer.experts.register_forward_pre_hook(note)
    return computed


def part_of(batch: Batch, mesh: Mesh) -> Batch:
    return batch.part(token_sharding(mesh, EP).slices(batch.x.shape[:2]))


@pytest.mark.parametrize("num_ranks", by_default([2, 4, 8], [4]))
def test_no_rank_computes_many_more_rows_than_the_mean(num_ranks: int) -> None:
    """At most 1.15 times the mean, for loads from even to all tokens on one expert."""
    names = ("mixtral", "longcat_flash")  # all slots are rows, or some select experts that compute nothing
    batches = {(name, load): make_batch(FAMILIES[name], load) for name in names for load in LOADS}

    def check() -> dict[tuple[str, str], tuple[Computed, list[int]]]:
        mesh, found = Mesh({"expert": num_ranks}), {}
        for (name, load), batch in batches.items():
            layer = parallelize(make_layer(FAMILIES[name]), mesh, EP, dispatch="least_loaded")
            computed = spy(layer)
            with free_moves():
                stats = take_step(layer, part_of(batch, mesh)).stats
            (of_step,) = computed
            found[name, load] = of_step, stats.tokens_per_expert[:NUM_EXPERTS].view(num_ranks, -1).sum(1).tolist()
        return found

    by_rank = run_ranks(check, num_ranks)
    for case in batches:
        computed, routed = [found[case][0] for found in by_rank], by_rank[0][case][1]
        rows = [rank.own + rank.foreign for rank in computed]
        assert sum(rows) == sum(routed)
        bound = max(-(-sum(rows) // num_ranks), 1.15 * sum(rows) / num_ranks)
        assert max(rows) <= bound, (case, computed)
        is_moved = max(rank.num_foreign for rank in computed) > 0
        assert is_moved == (max(routed) > bound), (case, computed)
        assert is_moved or rows == routed
        # The bound of test_loads_and_moves_are_bounded.
        assert max(rank.num_foreign for rank in computed) <= NUM_EXPERTS // num_ranks + num_ranks - 1


def kept_bytes(layer: MoE, batch: Batch) -> int:
    """Bytes that autograd keeps for the backward, without parameters."""
    stored = [getattr(parameter, "_local_tensor", parameter) for parameter in layer.parameters()]
    record = maxmoe.nn.RoutingRecord({"": [batch.experts]})
    with free_moves(), maxmoe.replay_routing(layer, record), saved_for_backward(stored) as kept:
        output = layer(batch.x.clone().requires_grad_())
    total = num_bytes(kept)
    output.hidden_states.sum().backward()
    return total


def test_foreign_weights_are_not_kept_for_the_backward() -> None:
    """All ranks together keep the same tensors as without moves, and integers: a row of each expert's plan."""
    config = replace(FAMILIES["mixtral"], hidden_size=32, intermediate_size=64)
    batch = make_batch(config, HOT)

    def check() -> list[tuple[int, int]]:
        mesh, results = Mesh({"expert": 4}), []
        for frozen in (False, True):
            kept = []
            for dispatch in ("ragged_all_to_all", "least_loaded"):
                layer = make_layer(config)
                layer.experts.requires_grad_(not frozen)
                parallelize(layer, mesh, EP, dispatch=dispatch)
                computed = spy(layer)
                kept.append(kept_bytes(layer, part_of(batch, mesh)))
            results.append((kept[1] - kept[0], computed[0].num_foreign))
        return results

    weights_of_an_expert = 3 * 32 * 64 * 8
    for by_rank in zip(*run_ranks(check, 4), strict=True):
        more, num_foreign = map(sum, zip(*by_rank, strict=True))
        assert num_foreign >= 3 and more < weights_of_an_expert / 2


def test_ranks_with_different_plans_are_an_error_by_name() -> None:
    def check() -> list[str]:
        layer = parallelize(make_layer(FAMILIES["mixtral"]), Mesh({"expert": 4}), EP, dispatch="least_loaded")
        is_other, messages = dist.get_rank() == 1, []
        for change in ({"FLOP_PER_BYTE": {"cpu": 10, "cuda": 10}}, {"TRIED_PERCENT": (115,)}, {}):
            with (
                free_moves(),
                patch.dict(vars(least_loaded), change if is_other else {}),
                torch.autocast("cpu", torch.bfloat16, enabled=is_other and not change),
                pytest.raises(RuntimeError, match="least_loaded: all ranks must derive the same plan") as error,
            ):
                layer(torch.randn(1, 8, 8, dtype=torch.float64))
            messages.append(str(error.value))
        return messages

    first, *others = run_ranks(check, 4)
    assert all(messages == first for messages in others) and len(first) == 3
    for message in first:
        checksums = re.findall(r"rank \d ([0-9a-f]{8})", message)
        assert len(checksums) == 4 and len({checksums[rank] for rank in (0, 2, 3)} - {checksums[1]}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": "dense"}, "least_loaded .* implementation must be 'sparse', got 'dense'"),
        ({"buffer_factor": 1.5}, r"least_loaded drops no rows: .* \(1\.5\) .* overflow='chunks', got overflow='drop'"),
        (
            {"implementation": "dense", "capacity_factor": 1.0},
            "got 'least_loaded', which sends rows without their sequences",
        ),
    ],
)
def test_what_it_cannot_run(changes: dict[str, Any], message: str) -> None:
    layer = MoE(replace(FAMILIES["mixtral"], **changes))
    with fake_rank(0, 2), pytest.raises(ValueError, match=message):
        parallelize(layer, Mesh({"expert": 2}), EP, dispatch="least_loaded")


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
