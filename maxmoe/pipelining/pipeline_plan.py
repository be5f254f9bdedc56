"""Plan of each stage of a pipeline, and the order and the times of its forwards and backwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.plan import Plan
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.pipelining.schedules import check_schedule, schedule_kind
from maxmoe.pipelining.stage_modules import StagePart, pipeline_parts, stage_module, stage_parts, work_per_token
from maxmoe.pipelining.timeline import (
    FORWARD,
    Action,
    Timeline,
    in_flight,
    schedule_order,
    simulate,
    with_whole_backwards,
)
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh
from maxmoe.sharding.rules import LogicalRules


@dataclass(frozen=True)
class PipelineOptions:
    """How `maxmoe.pipeline` cuts and runs a model: its arguments of these names."""

    schedule: str
    num_micro_batches: int
    blocks_per_stage: Sequence[int] | None
    stages_per_rank: int | None


def pipeline_options(
    schedule: str, num_micro_batches: int | None, blocks_per_stage: Sequence[int] | None, stages_per_rank: int | None
) -> PipelineOptions | None:
    """Return the options, or None without a number of micro-batches: the model is then planned without stages."""
    if num_micro_batches is None:
        return None
    return PipelineOptions(schedule, num_micro_batches, blocks_per_stage, stages_per_rank)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Plan of one stage.

    Args:
        rank: rank along the axis `stage` that has the stage.
        parts: names of its parts of the model, such as "embedding, blocks.0-3".
        plan: plan of its module on the mesh within a stage.
        work: multiplications per token with weights, relative to the mean over the stages.
    """

    index: int
    rank: int
    parts: str
    plan: Plan
    work: float

    @property
    def num_parameters(self) -> int:
        """Number of elements of the parameters of the stage, over all ranks."""
        return sum(parameter.parameter.num_weights for parameter in self.plan.parameters.values())


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Plan of a pipeline.

    Args:
        stages: plans of the stages, in order.
        order: actions of each rank along the axis `stage`.
        timeline: their times, in forwards of a stage with the mean work. Messages and collectives take no time.
    """

    options: PipelineOptions
    stages: tuple[StagePlan, ...]
    order: tuple[tuple[Action, ...], ...]
    timeline: Timeline

    @property
    def num_ranks(self) -> int:
        """Number of ranks along the axis `stage`."""
        return len(self.order)

    @property
    def smallest_bubble(self) -> float:
        """Share of the step in which a rank computes nothing if all stages have the same work."""
        return simulate(self.order, [1.0] * len(self.stages)).bubble

    def stages_of(self, rank: int) -> list[StagePlan]:
        """Return the stages of a rank, in order."""
        return [stage for stage in self.stages if stage.rank == rank]

    def work(self, rank: int) -> float:
        """Return the work of the stages of a rank, relative to the mean over the ranks."""
        return sum(stage.work for stage in self.stages_of(rank)) * self.num_ranks / len(self.stages)

    def max_in_flight(self, rank: int) -> dict[int, int]:
        """Return the largest number of micro-batches in flight in each stage of a rank."""
        counts = in_flight(self.order[rank])
        return {stage: max(count[stage] for count in counts) for stage in counts[0]}

    def peak(self, rank: int, costs: Mapping[int, int]) -> int:
        """Return the most bytes that the micro-batches in flight take on a rank; `costs`: bytes of one, by stage."""
        return max(
            sum(count * costs[stage] for stage, count in counts.items()) for counts in in_flight(self.order[rank])
        )

    def gradient_peak(self, rank: int, costs: Mapping[int, int]) -> int:
        """Return the most bytes of gradients that are kept from the first to the last backward of their stage."""
        backwards = [action.stage for action in self.order[rank] if action.kind != FORWARD]
        total = [0] * len(backwards)
        for stage, cost in costs.items():
            first, last = backwards.index(stage), len(backwards) - backwards[::-1].index(stage)
            total[first:last] = [count + cost for count in total[first:last]]
        return max(total)

    @property
    def slowest(self) -> int:
        """Rank with the most work."""
        return max(range(self.num_ranks), key=self.work)


def plan_pipeline(
    module: nn.Module,
    mesh: Mesh,
    rules: LogicalRules,
    options: PipelineOptions,
    *,
    dispatch: Dispatch,
    num_chunks: int,
) -> PipelinePlan:
    """Plan each stage of a model as `maxmoe.pipeline` does."""
    num_ranks = mesh.size(STAGE_AXIS)
    kind = schedule_kind(options.schedule)
    count = check_schedule(options.schedule, num_ranks, options.stages_per_rank, options.num_micro_batches)
    parts = stage_parts(module, num_ranks * count, options.blocks_per_stage)
    modules = [stage_module(module, part) for part in parts]
    work = [work_per_token(part) for part in modules]
    mean = sum(work) / len(work) or 1.0
    stages = tuple(
        StagePlan(
            index=index,
            rank=kind.rank_of(index, num_ranks),
            parts=_names(module, part),
            plan=make_plan(
                modules[index],
                mesh.within_stage(),
                rules,
                dispatch=dispatch,
                num_chunks=num_chunks,
                allow_unused=True,
                splits_backward=kind.splits_backward,
            ),
            work=work[index] / mean,
        )
        for index, part in enumerate(parts)
    )
    order = schedule_order(options.schedule, num_ranks, options.stages_per_rank, options.num_micro_batches)
    whole = [stage.index for stage in stages if any(planned.is_recomputed for planned in stage.plan.values())]
    actions = tuple(map(tuple, with_whole_backwards(order, whole)))
    timeline = simulate(actions, [stage.work for stage in stages])
    return PipelinePlan(options=options, stages=stages, order=actions, timeline=timeline)


def plan_model(
    module: nn.Module,
    mesh: Mesh,
    rules: LogicalRules,
    options: PipelineOptions | None,
    *,
    allow_unused: bool,
    dispatch: Dispatch,
    num_chunks: int,
) -> tuple[Plan, PipelinePlan | None]:
    """Plan a whole model on the ranks of a stage, and its stages if there are options for them and an axis `stage`."""
    make = partial(make_plan, module, rules=rules, allow_unused=allow_unused, dispatch=dispatch, num_chunks=num_chunks)
    if options is None or mesh.size(STAGE_AXIS) == 1:
        return make(mesh), None
    plan = make(mesh.within_stage())
    return plan, plan_pipeline(module, mesh, rules, options, dispatch=dispatch, num_chunks=num_chunks)


def _names(module: nn.Module, part: StagePart) -> str:
    """Name the parts of a stage, such as "embedding, blocks.0-3"."""
    parts = pipeline_parts(module)
    first, last = part.blocks[0], part.blocks[-1]
    names = [f"{parts.blocks}.{first}" + (f"-{last}" if last != first else "")]
    return ", ".join([*(parts.first if part.is_first else ()), *names, *(parts.last if part.is_last else ())])
