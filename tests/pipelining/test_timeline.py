"""The order of a schedule against real ranks, and its times; tests/costs/test_stages.py compares what is in flight."""

from collections import Counter

import pytest
import torch
from torch.distributed.pipelining import schedules

from maxmoe.pipelining import pipeline
from maxmoe.pipelining.fsdp_gathers import fsdp_gathers
from maxmoe.pipelining.schedules import SCHEDULES, check_schedule
from maxmoe.pipelining.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Timeline,
    in_flight,
    schedule_order,
    simulate,
    with_whole_backwards,
)
from maxmoe.sharding import Mesh
from pipelining.staged_models import Model, squares
from support.documented import docs_module
from support.parallel_decoder import batch
from support.run_ranks import run_ranks
from support.slow_cases import by_default
from support.staged_decoder import config, staged

NUM_MICRO_BATCHES = 8
CASES = [*((schedule, 2) for schedule in SCHEDULES), ("1f1b", 4), ("zbv", 4)]


def planned(schedule: str, num_ranks: int, num_micro_batches: int = NUM_MICRO_BATCHES) -> Timeline:
    """Costs of stages with equal work, whose sum on a rank is one."""
    count = SCHEDULES[schedule].default_stages_per_rank
    order = schedule_order(schedule, num_ranks, None, num_micro_batches)
    return simulate(order, [1 / count] * (num_ranks * count))


def actions_of(timeline: Timeline) -> list[list[Action]]:
    return [[span.action for span in spans] for spans in timeline.ranks]


def real_steps(schedule: str, num_ranks: int, recompute: tuple[str, ...] = ()) -> list[list[Timeline]]:
    """Timelines of the first and the third step, by rank; blocks have no experts."""
    num_stages = num_ranks * SCHEDULES[schedule].default_stages_per_rank
    record_step = docs_module("pipeline_pictures").record_step  # alone: ranks do not import what draws

    def run() -> list[Timeline]:
        pipeline = staged(
            config("mixtral", num_layers=num_stages, moe=None),
            Mesh({"stage": num_ranks}),
            "default",
            schedule,
            num_micro_batches=2 * num_ranks,
            recompute=recompute,
        )
        first = record_step(pipeline, *batch())
        pipeline.step(*batch())  # is not in the next timeline
        return [first, record_step(pipeline, *batch())]

    return run_ranks(run, num_ranks)


@pytest.mark.parametrize("case", by_default(CASES, [("dual_pipe_v", 2)]), ids=str)
def test_the_plan_is_what_ranks_run(case: tuple[str, int]) -> None:
    schedule, num_ranks = case
    expected = [list(actions) for actions in schedule_order(schedule, num_ranks, None, 2 * num_ranks)]
    steps = real_steps(schedule, num_ranks)
    for timeline in steps[0]:
        assert actions_of(timeline) == expected == actions_of(planned(schedule, num_ranks, 2 * num_ranks))
        assert 0 < timeline.bubble < 1
        assert min(spans[0].start for spans in timeline.ranks) == 0
        for spans in timeline.ranks:
            ends = [0.0, *(span.end for span in spans)]
            assert all(end <= span.start < span.end for end, span in zip(ends, spans, strict=False))
    assert all(step == steps[0] for step in steps), "all ranks have the timeline of all"
    assert not any(any(in_flight(actions)[-1].values()) for actions in expected)


def test_a_recomputed_stage_computes_all_gradients_at_once() -> None:
    whole = with_whole_backwards(schedule_order("interleaved_zero_bubble", 2, None, 4), range(4))
    assert {action.kind for actions in whole for action in actions} == {FORWARD, BACKWARD}
    assert actions_of(real_steps("interleaved_zero_bubble", 2, ("blocks",))[0][1]) == whole


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(1, 4), (2, 8), (4, 20)])
def test_bubble_of_the_papers(num_ranks: int, num_micro_batches: int) -> None:
    """GPipe and 1F1B: (P - 1) / (M + P - 1). Interleaved with V stages: (P - 1) / (V M + P - 1)."""
    wait = num_ranks - 1
    for schedule, rounds in {"gpipe": 1, "1f1b": 1, "looped_bfs": 2, "interleaved_1f1b": 2}.items():
        bubble = planned(schedule, num_ranks, num_micro_batches).bubble
        assert bubble == pytest.approx(wait / (rounds * num_micro_batches + wait)), schedule


TORCH = schedules._ComputationType
KINDS = {FORWARD: TORCH.FORWARD, BACKWARD_INPUT: TORCH.BACKWARD_INPUT, BACKWARD_WEIGHT: TORCH.BACKWARD_WEIGHT}
KINDS["backward"] = TORCH.FULL_BACKWARD


@pytest.mark.parametrize("stages_per_rank", [2, 4, 5])
def test_stages_are_gathered_ahead_as_by_torch(stages_per_rank: int) -> None:
    """A split backward keeps parameters after a forward, so that there are no other gathers."""
    schedule = "interleaved_zero_bubble"
    for actions in schedule_order(schedule, 2, stages_per_rank, 4):
        theirs = [schedules._Action(action.stage, KINDS[action.kind], action.micro_batch) for action in actions]
        with_gathers = schedules._add_unshard_reshard(theirs)
        expected = Counter(each.stage_index for each in with_gathers if each.computation_type == TORCH.UNSHARD)
        gathers = fsdp_gathers(actions, SCHEDULES[schedule])
        assert {stage: sum(numbers.values()) for stage, numbers in gathers.items()} == expected


@pytest.mark.parametrize("name", by_default(SCHEDULES, ["interleaved_1f1b"]))
def test_torch_runs_every_number_that_is_accepted(name: str) -> None:
    accepted = []
    for count in range(1, 9):
        try:
            check_schedule(name, 2, None, count)
        except ValueError:
            continue
        accepted.append(count)
    assert accepted == {
        "1f1b": [2, 3, 4, 5, 6, 7, 8],
        "dual_pipe_v": [4, 5, 6, 7, 8],
        "interleaved_1f1b": [1, 2, 3, 4, 6, 8],
        "interleaved_zero_bubble": [1, 2, 3, 4, 6, 8],
    }.get(name, [1, 2, 3, 4, 5, 6, 7, 8])

    def check() -> None:
        for count in accepted:
            run = pipeline(Model(), Mesh({"stage": 2}), loss=squares, schedule=name, num_micro_batches=count)
            x = torch.ones(count, 6, dtype=torch.float64)
            run.step(x, x)

    run_ranks(check, 2)
