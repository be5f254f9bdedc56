"""Order of the forwards and backwards of a schedule on each rank, and their times."""

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
            input of the stage, "backward_weight" those of its parameters.
        stage: number of the stage.
        micro_batch: number of the micro-batch.
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
    """Return the actions of each rank, in the order in which the rank runs them.

    Args:
        schedule: name of the schedule, as in `maxmoe.pipeline`.
        num_ranks: size of the axis `stage`.
        stages_per_rank: number of stages of each rank; None for that of the schedule.
        num_micro_batches: number of micro-batches of a step.

    Raises:
        ValueError: for an unknown schedule, and for numbers that the schedule cannot run.
    """
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
    actions = [Action(FORWARD, stage, number) for number in range(num_warmups)]
    for number in range(num_micro_batches):
        actions.append(Action(BACKWARD, stage, number))
        if num_warmups + number < num_micro_batches:
            actions.append(Action(FORWARD, stage, num_warmups + number))
    return tuple(actions)


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

    Args:
        order: actions of each rank, see `schedule_order`.
        work: work of each stage.
    """
    ends: dict[Action, float] = {}
    ranks: list[list[Span]] = [[] for _ in order]
    while any(len(spans) < len(actions) for spans, actions in zip(ranks, order, strict=True)):
        before = len(ends)
        for spans, actions in zip(ranks, order, strict=True):
            while len(spans) < len(actions):
                action = actions[len(spans)]
                inputs = _inputs(action, len(work))
                arrivals = [ends[needed] for needed in inputs if needed in ends]
                if inputs and not arrivals:
                    break
                begin = max([spans[-1].end if spans else 0.0, *arrivals])
                ends[action] = begin + DURATIONS[action.kind] * work[action.stage]
                spans.append(Span(action, begin, ends[action]))
        assert len(ends) > before, "a schedule must not wait for itself"
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
    """Count the micro-batches whose forward has run and whose backward has not, in each stage of a rank.

    The tensors that a forward has saved are freed by the backward, or by its second half if it is split.

    Args:
        actions: actions of the rank.

    Returns:
        Numbers by stage, after each action.
    """
    change = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: 0, BACKWARD_WEIGHT: -1}
    counts, result = dict.fromkeys(sorted({action.stage for action in actions}), 0), []
    for action in actions:
        counts[action.stage] += change[action.kind]
        result.append(dict(counts))
    return result
