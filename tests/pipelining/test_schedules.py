"""Every schedule, with every strategy, FSDP2 and recomputation, equals one process that accumulates gradients."""

import functools
import itertools
from typing import Any

import pytest

from maxmoe.pipelining.schedules import SCHEDULES
from maxmoe.sharding import Mesh
from support.run_ranks import run_cases
from support.sampling import by_default
from support.staged_decoder import (
    MOE,
    Step,
    batch,
    check_step,
    config,
    part_of_micro_batches,
    staged,
    step_of_one_process,
)

# By name: mesh axes within a stage, rules, dispatch.
WAYS: dict[str, tuple[dict[str, int], str, Any]] = {
    "ring": ({"expert": 2}, "default", "ring_of_experts"),
    "ragged": ({"expert": 2}, "default", "ragged_all_to_all"),
    "ep-tp": ({"expert": 2}, "ep-tp", "auto"),
    "gathered": ({"expert": 2}, "default", "gather_weights"),
    "fsdp": ({"fsdp": 2}, "default", "auto"),
}
NUM_MICRO_BATCHES = 4
RECOMPUTED: list[tuple[str, ...]] = [(), ("blocks",), ("experts", "dispatch")]


def check(
    expected: dict[str, Step], schedule: str, way: str, family: str, recompute: tuple[str, ...], num_steps: int
) -> None:
    """Steps without zero_grad in between."""
    axes, rules, dispatch = WAYS[way]
    mesh = Mesh({"stage": 2, **axes})
    options: Any = {"dispatch": dispatch, "recompute": recompute, "num_micro_batches": NUM_MICRO_BATCHES}
    run = staged(config(family), mesh, rules, schedule, **options)
    tokens, targets = (part_of_micro_batches(whole, mesh, rules, NUM_MICRO_BATCHES) for whole in batch())
    for _ in range(num_steps):
        found = run.step(tokens, targets)
    check_step(found, run, expected[family], times=num_steps)


def cases() -> list[tuple[str, str, str, tuple[str, ...], int]]:
    """Each schedule with each mesh and dispatch; alternating families, recomputed parts and numbers of steps."""
    return [
        (schedule, way, list(MOE)[(row + column) % 3], RECOMPUTED[(row // 3 + column) % 3], 1 + (row + column) % 2)
        for (row, schedule), (column, way) in itertools.product(enumerate(SCHEDULES), enumerate(WAYS))
    ]


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(range(5), 2)))
def test_every_pair_occurs(first: int, second: int) -> None:
    values = [{case[place] for case in cases()} for place in (first, second)]
    assert {(case[first], case[second]) for case in cases()} == set(itertools.product(*values))


# By the first schedule, with which the others follow: each mesh and dispatch with another one.
PAIRS = [[*zip([*SCHEDULES, *SCHEDULES][first:], WAYS, strict=False)] for first in range(len(SCHEDULES))]
# A split backward with FSDP2 is also in test_adapters.py.
PAIRS[:1] = [PAIRS[0][:-1], PAIRS[0][-1:]]


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize("pairs", by_default(PAIRS, PAIRS[:1]), ids=lambda pairs: ", ".join(pairs[0]))
def test_equals_one_process_on_four_ranks(pairs: list[tuple[str, str]]) -> None:
    expected = {family: step_of_one_process(config(family), NUM_MICRO_BATCHES) for family in MOE}
    run_cases(functools.partial(check, expected), 4, (case for case in cases() if case[:2] in pairs))
