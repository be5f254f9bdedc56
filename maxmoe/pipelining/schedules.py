"""Schedules of a pipeline: the order of the forwards and backwards of all micro-batches on each rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed import pipelining

from maxmoe.checks.fields import nearest


@dataclass(frozen=True, kw_only=True)
class ScheduleKind:
    """Properties of a schedule of `torch.distributed.pipelining`.

    Args:
        make: class of the schedule.
        default_stages_per_rank: number of stages of a rank unless another one is asked for.
        has_one_stage: whether each rank has one stage.
        is_v_shaped: whether a rank has two stages, the first half of the stages in the order of the ranks and the
            second half in reverse, so that the first rank has the first and the last stage; otherwise stage s is on
            rank s % num_ranks.
        splits_backward: whether the gradients of the inputs and those of the weights are computed at different times.
        needs_one_per_stage: whether there must be a micro-batch for each stage.
        has_rounds: whether the number of micro-batches must be a multiple of the number of rounds; see
            `check_schedule`.
    """

    make: Callable[..., Any]
    default_stages_per_rank: int = 2
    has_one_stage: bool = False
    is_v_shaped: bool = False
    splits_backward: bool = False
    needs_one_per_stage: bool = False
    has_rounds: bool = False

    def stages_of(self, rank: int, num_ranks: int, stages_per_rank: int) -> list[int]:
        """Return the stages of a rank, in ascending order."""
        if self.is_v_shaped:
            return [rank, 2 * num_ranks - 1 - rank]
        return [rank + round_ * num_ranks for round_ in range(stages_per_rank)]

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """Return the rank along the axis `stage` that has a stage."""
        if self.is_v_shaped:
            return min(stage, 2 * num_ranks - 1 - stage)
        return stage % num_ranks


SCHEDULES = {
    "gpipe": ScheduleKind(make=pipelining.ScheduleGPipe, default_stages_per_rank=1, has_one_stage=True),
    "1f1b": ScheduleKind(
        make=pipelining.Schedule1F1B, default_stages_per_rank=1, has_one_stage=True, needs_one_per_stage=True
    ),
    "looped_bfs": ScheduleKind(make=pipelining.ScheduleLoopedBFS),
    "interleaved_1f1b": ScheduleKind(make=pipelining.ScheduleInterleaved1F1B, has_rounds=True),
    "interleaved_zero_bubble": ScheduleKind(
        make=pipelining.ScheduleInterleavedZeroBubble, splits_backward=True, has_rounds=True
    ),
    "zbv": ScheduleKind(make=pipelining.ScheduleZBVZeroBubble, is_v_shaped=True, splits_backward=True),
    "dual_pipe_v": ScheduleKind(
        make=pipelining.ScheduleDualPipeV, is_v_shaped=True, splits_backward=True, needs_one_per_stage=True
    ),
}


class Cost(NamedTuple):
    """Cost of a part of a model.

    Attributes:
        parameters: share of the parameters of the model.
        work: share of the multiplications of a token.
    """

    parameters: float
    work: float


def schedule_kind(name: str) -> ScheduleKind:
    """Return the schedule with a name.

    Raises:
        ValueError: for an unknown name, with all names.
    """
    if name not in SCHEDULES:
        names = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"schedule must be one of {names}, got {name!r}{nearest(str(name), SCHEDULES)}")
    return SCHEDULES[name]


def check_schedule(name: str, num_ranks: int, stages_per_rank: int | None, num_micro_batches: int) -> int:
    """Return the number of stages of each rank.

    Args:
        name: name of the schedule.
        num_ranks: size of the axis `stage`.
        stages_per_rank: number of stages of each rank; None for that of the schedule.
        num_micro_batches: number of micro-batches of a step.

    Raises:
        ValueError: for an unknown schedule, and for numbers that the schedule cannot run.
    """
    kind = schedule_kind(name)
    if not isinstance(num_micro_batches, int) or num_micro_batches < 1:
        raise ValueError(f"num_micro_batches must be a positive int, got {num_micro_batches!r}")
    count = kind.default_stages_per_rank if stages_per_rank is None else stages_per_rank
    required = 1 if kind.has_one_stage else 2 if kind.is_v_shaped else None
    if not isinstance(count, int) or count < 1 or (required is not None and count != required):
        wanted = "a positive int" if required is None else str(required)
        raise ValueError(f"stages_per_rank must be {wanted} for the schedule {name!r}, got {stages_per_rank!r}")
    num_stages = num_ranks * count
    if kind.needs_one_per_stage and num_micro_batches < num_stages:
        raise ValueError(
            f"num_micro_batches must be at least the number of stages ({num_stages}) for the schedule {name!r}, "
            f"got {num_micro_batches}"
        )
    rounds = max(1, num_micro_batches // num_ranks)
    if kind.has_rounds and num_micro_batches % rounds:
        raise ValueError(
            f"num_micro_batches must be a multiple of {rounds}, the number of rounds over {num_ranks} ranks, for the "
            f"schedule {name!r}, got {num_micro_batches}"
        )
    return count


def partition_blocks(costs: Sequence[Cost], num_stages: int) -> list[int]:
    """Cut a list of blocks into stages such that the largest cost of a stage is as small as possible.

    Args:
        costs: costs of the part before the blocks, of each block, and of the part after the blocks. The first and the
            last stage have the first and the last part as well. The cost of a stage is the larger one of its two sums.
        num_stages: number of stages, at most the number of blocks.

    Returns:
        Number of blocks of each stage, at least one.
    """
    num_blocks = len(costs) - 2
    sums = [Cost(0.0, 0.0)]
    for cost in costs:
        sums.append(Cost(sums[-1].parameters + cost.parameters, sums[-1].work + cost.work))

    def cost_of(stage: int, begin: int, end: int) -> float:
        before = sums[begin + 1 if stage > 0 else 0]
        after = sums[end + 1 if stage < num_stages - 1 else end + 2]
        return max(after.parameters - before.parameters, after.work - before.work)

    # best[end]: the smallest possible largest cost of the stages so far, which have the blocks before `end`, and the
    # begin of the last of them. Of equal ones, the first, so that all ranks find the same.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(num_stages):
        ends = range(stage + 1, num_blocks - (num_stages - 1 - stage) + 1)
        best.append(
            {
                end: min(
                    (max(so_far, cost_of(stage, begin, end)), begin)
                    for begin, (so_far, _) in best[-1].items()
                    if begin < end
                )
                for end in ends
            }
        )
    counts, end = [], num_blocks
    for stage in range(num_stages, 0, -1):
        begin = best[stage][end][1]
        counts.append(end - begin)
        end = begin
    return counts[::-1]
