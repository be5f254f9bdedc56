"""Schedules of a pipeline: the order of the forwards and backwards of all micro-batches on each rank."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from maxmoe.checks.fields import check_int, nearest


@dataclass(frozen=True)
class ScheduleKind:
    """Properties of a schedule of `torch.distributed.pipelining`.

    Stage s is on rank s % num_ranks. In a V shape, a rank has two stages, the first half of the stages in the order of
    the ranks and the second half in reverse, so that the first rank has the first and the last stage.
    """

    class_name: str  # in torch.distributed.pipelining
    _: KW_ONLY
    has_one_stage: bool = False  # of each rank; two by default in all others
    is_v_shaped: bool = False
    splits_backward: bool = False  # the gradients of inputs and of weights are computed at different times
    needs_one_per_stage: bool = False  # at least one micro-batch for each stage
    has_rounds: bool = False  # the number of micro-batches is a multiple of the number of rounds, see `check_schedule`

    def make(self, *arguments: Any, **options: Any) -> Any:
        """Make a schedule of torch, with arguments of its class."""
        from torch.distributed import pipelining  # imports the compiler, which most plans do not need

        return getattr(pipelining, self.class_name)(*arguments, **options)

    @property
    def default_stages_per_rank(self) -> int:
        """Number of stages of a rank unless another one is asked for."""
        return 1 if self.has_one_stage else 2

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
    "gpipe": ScheduleKind("ScheduleGPipe", has_one_stage=True),
    "1f1b": ScheduleKind("Schedule1F1B", has_one_stage=True, needs_one_per_stage=True),
    "looped_bfs": ScheduleKind("ScheduleLoopedBFS"),
    "interleaved_1f1b": ScheduleKind("ScheduleInterleaved1F1B", has_rounds=True),
    "interleaved_zero_bubble": ScheduleKind("ScheduleInterleavedZeroBubble", splits_backward=True, has_rounds=True),
    "zbv": ScheduleKind("ScheduleZBVZeroBubble", is_v_shaped=True, splits_backward=True),
    "dual_pipe_v": ScheduleKind("ScheduleDualPipeV", is_v_shaped=True, splits_backward=True, needs_one_per_stage=True),
}


def schedule_kind(name: str) -> ScheduleKind:
    """Return the schedule with a name; raise a ValueError for an unknown one."""
    if name not in SCHEDULES:
        names = ", ".join(map(repr, SCHEDULES))
        raise ValueError(f"schedule must be one of {names}, got {name!r}{nearest(str(name), SCHEDULES)}")
    return SCHEDULES[name]


def check_schedule(name: str, num_ranks: int, stages_per_rank: int | None, num_micro_batches: int) -> int:
    """Return the number of stages of each rank; raise a ValueError for numbers that the schedule cannot run."""
    kind = schedule_kind(name)
    check_int("num_micro_batches", num_micro_batches, at_least=1)
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
