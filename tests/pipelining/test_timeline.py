"""The order of a schedule against real ranks, and its times; tests/costs/test_stages.py compares what is in flight."""

from collections import Counter

import pytest

from maxmoe.pipelining.schedules import SCHEDULES
from maxmoe.pipelining.timeline import (
    BACKWARD,
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
from support.docs_module import docs_module
from support.run_ranks import run_ranks
from support.slow_cases import by_default
from support.staged_decoder import batch, config, staged

pictures = docs_module("pipeline_pictures")
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

    def run() -> list[Timeline]:
        pipeline = staged(
            config("mixtral", num_layers=num_stages, moe=None),
            Mesh({"stage": num_ranks}),
            "default",
            schedule,
            num_micro_batches=2 * num_ranks,
            recompute=recompute,
        )
        first = pictures.record_step(pipeline, *batch())
        pipeline.step(*batch())  # is not in the next timeline
        return [first, pictures.record_step(pipeline, *batch())]

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


def test_a_split_backward_waits_less() -> None:
    bubbles = {schedule: planned(schedule, 4).bubble for schedule in SCHEDULES}
    assert bubbles["1f1b"] > bubbles["interleaved_1f1b"]
    for schedule in ("interleaved_zero_bubble", "zbv", "dual_pipe_v"):
        assert bubbles["interleaved_1f1b"] > 2 * bubbles[schedule] > 0


def test_a_slow_stage_makes_the_others_wait() -> None:
    """Three forwards of stage 0, then each backward of stage 1 and the last one of stage 0 follow one another."""
    timeline = simulate(schedule_order("gpipe", 2, None, 3), [1.0, 2.0])
    # Stage 1: starts at 1, three forwards of 2 and three backwards of 4; then the last backward of stage 0, of 2.
    assert timeline.duration == 1 + 3 * 2 + 3 * 4 + 2
    assert timeline.idle(0) == pytest.approx(1 - 9 / 21) and timeline.idle(1) == pytest.approx(1 - 18 / 21)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_micro_batch_runs_once_through_each_stage(schedule: str) -> None:
    actions = [span.action for rank in planned(schedule, 4).ranks for span in rank]
    num_stages = 4 * SCHEDULES[schedule].default_stages_per_rank
    expected = Counter((stage, number) for stage in range(num_stages) for number in range(NUM_MICRO_BATCHES))
    for kinds in ((FORWARD,), (BACKWARD, BACKWARD_WEIGHT)):
        assert Counter((action.stage, action.micro_batch) for action in actions if action.kind in kinds) == expected
