"""Order of the forwards and backwards of a schedule on each rank, and their times."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from maxmoe._torch import schedule_actions
from maxmoe.pipelining.schedules import check_schedule, schedule_kind

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "forward", "backward", "backward_input", "backward_weight"
# Time of each kind of action, in forwards of a stage with the mean work.
DURATIONS = {FORWARD: 1.0, BACKWARD: 2.0, BACKWARD_INPUT: 1.0, BACKWARD_WEIGHT: 1.0}


class Action(NamedTuple):
    """Computation of one micro-batch in one stage.

    Args:
        kind: "forward", "backward", or one half of a split backward: "backward_input" computes the gradient of the
            input of the stage, "backward_weight" the gradients of its parameters.
    """

    kind: str
    stage: int
    micro_batch: int


class Span(NamedTuple):
    """Action with its start and end, in the unit of the timeline."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Actions of each rank along the axis `stage` in one step, in the order in which the rank runs them.

    Args:
        ranks: for each rank, its actions with start and end; the first action of all ranks begins at zero.
    """

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def duration(self) -> float:
        """Time from the start of the first action to the end of the last one."""
        return max(span.end for spans in self.ranks for span in spans)

    def idle(self, rank: int) -> float:
        """Return the share of the step in which a rank computes nothing."""
        return 1 - sum(span.end - span.start for span in self.ranks[rank]) / self.duration

    @property
    def bubble(self) -> float:
        """Share of the step in which a rank computes nothing, the mean over the ranks."""
        return sum(map(self.idle, range(len(self.ranks)))) / len(self.ranks)


@cache
def schedule_order(
    schedule: str, num_ranks: int, stages_per_rank: int | None, num_micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank, in the order in which the rank runs them; raise as `check_schedule`."""
    count = check_schedule(schedule, num_ranks, stages_per_rank, num_micro_batches)
    kind = schedule_kind(schedule)
    if kind.has_one_stage:
        # torch plans these two for display only, and 1F1B wrongly: the last rank misses the first micro-batch.
        warmups = [num_ranks - rank if schedule == "1f1b" else num_micro_batches for rank in range(num_ranks)]
        return tuple(_one_stage_order(rank, warmups[rank], num_micro_batches) for rank in range(num_ranks))
    kinds = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHT}
    orders = schedule_actions(kind.make, kind.stages_of(0, num_ranks, count), num_ranks, num_micro_batches)
    return tuple(tuple(Action(kinds[letter], *where) for letter, *where in order) for order in orders)


def _one_stage_order(stage: int, num_warmups: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Return the warm-up forwards, then backwards and forwards in turn, then the backwards that are left."""
    forwards = [Action(FORWARD, stage, number) for number in range(num_micro_batches)]
    backwards = [action._replace(kind=BACKWARD) for action in forwards]
    in_turn = itertools.zip_longest(backwards, forwards[num_warmups:])
    return *forwards[:num_warmups], *(action for pair in in_turn for action in pair if action is not None)


def with_whole_backwards(order: Sequence[Sequence[Action]], stages: Collection[int]) -> list[list[Action]]:
    """Compute all gradients of some stages at once, in the first half of a split backward.

    A stage with a `maxmoe.nn.Checkpointed` module that is recomputed does so, otherwise it would recompute it twice.
    """
    return [
        [
            action._replace(kind=BACKWARD) if action.stage in stages and action.kind == BACKWARD_INPUT else action
            for action in actions
            if action.stage not in stages or action.kind != BACKWARD_WEIGHT
        ]
        for actions in order
    ]


def simulate(order: Sequence[Sequence[Action]], work: Sequence[float]) -> Timeline:
    """Compute when each rank runs each action, if messages take no time.

    An action begins when its rank has ended the previous one and the input has arrived. A forward takes the time 1, as
    do the two halves of a backward, times the work of the stage.
    """
    ends: dict[Action, float] = {}
    ranks: list[list[Span]] = [[] for _ in order]
    before = -1
    while len(ends) > before:
        before = len(ends)
        for spans, actions in zip(ranks, order, strict=True):
            for action in actions[len(spans) :]:
                inputs = _inputs(action, len(work))
                arrivals = [ends[needed] for needed in inputs if needed in ends]
                if inputs and not arrivals:
                    break
                begin = max([spans[-1].end if spans else 0.0, *arrivals])
                ends[action] = begin + DURATIONS[action.kind] * work[action.stage]
                spans.append(Span(action, begin, ends[action]))
    assert len(ends) == sum(map(len, order)), "a schedule must not wait for itself"
    return Timeline(tuple(map(tuple, ranks)))


def _inputs(action: Action, num_stages: int) -> list[Action]:
    """Return the actions of which one must end before an action; none if it needs the micro-batch only."""
    kind, stage, number = action
    if kind == FORWARD:
        return [Action(FORWARD, stage - 1, number)] if stage > 0 else []
    if kind == BACKWARD_WEIGHT:
        return [Action(BACKWARD_INPUT, stage, number)]
    if stage == num_stages - 1:
        return [Action(FORWARD, stage, number)]
    return [Action(BACKWARD, stage + 1, number), Action(BACKWARD_INPUT, stage + 1, number)]


def in_flight(actions: Sequence[Action]) -> list[dict[int, int]]:
    """Count the micro-batches in flight by the stages of a rank, after each of its actions.

    The tensors that a forward has saved are freed by the backward, or by its second half if it is split.
    """
    change = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: 0, BACKWARD_WEIGHT: -1}
    counts, result = dict.fromkeys(sorted({action.stage for action in actions}), 0), []
    for action in actions:
        counts[action.stage] += change[action.kind]
        result.append(dict(counts))
    return result
