"""Costs of the ranks of a pipeline, and its stages as tables."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from maxmoe.parallel.plan.plan import Plan
from maxmoe.pipelining.boundary import Boundary
from maxmoe.pipelining.fsdp_gathers import NUM_AHEAD, fsdp_gathers
from maxmoe.pipelining.micro_batches import MicroBatch
from maxmoe.pipelining.pipeline_plan import PipelinePlan
from maxmoe.pipelining.schedules import schedule_kind
from maxmoe.planning.communication import activation_communication, dispatch_communication, parameter_communication
from maxmoe.planning.memory import (
    StateDtypes,
    activation_memory,
    parameter_dtype,
    stored_memory,
    unit_memory,
    unsharded_memory,
)
from maxmoe.planning.saved_tensors import local_tokens, micro_batch_sizes
from maxmoe.sharding.mesh import STAGE_AXIS
from maxmoe.sharding.planned_collective import PlannedCollective
from maxmoe.text_table import paragraph, readable_bytes, terminal_width, text_table

HEADINGS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "unsharded gradients": "unsharded",
    "gathered parameters": "gathered",
    "activations": "activations",
    "recomputed activations": "recomputed",
}


@dataclass(frozen=True)
class RankEstimate:
    """Costs of a rank along the axis `stage`.

    Args:
        stages: stages of the rank.
        in_flight: for each of them, the largest number of micro-batches whose forward has run and whose backward has
            not.
        memory: bytes by purpose, at the moment when the micro-batches in flight take the most. "unsharded gradients"
            are those of whole parameters, which FSDP2 keeps until the end of the step.
        sent_bytes: bytes that the rank sends to the ranks of other stages in a step.
        work: multiplications per token with weights, relative to the mean over the ranks.
        idle: share of the step in which the rank computes nothing.
    """

    stages: tuple[int, ...]
    in_flight: tuple[int, ...]
    memory: dict[str, int]
    sent_bytes: int
    work: float
    idle: float

    @property
    def total(self) -> int:
        """Bytes of all purposes."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class PipelineEstimate:
    """Costs of all ranks along the axis `stage`.

    Args:
        plan: plans of the stages, order and times of their actions.
        ranks: costs of each rank.
    """

    plan: PipelinePlan
    ranks: tuple[RankEstimate, ...]

    @property
    def largest(self) -> int:
        """Rank that needs the most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    def __str__(self) -> str:
        # The columns of what no rank has are left out.
        purposes = [name for name in self.ranks[0].memory if any(rank.memory[name] for rank in self.ranks)]
        headings = [HEADINGS.get(name, name) for name in purposes]
        rows = [("stage" if self.plan.num_ranks == len(self.plan.stages) else "stages", *headings, "total", "sent")]
        for rank in self.ranks:
            numbers = [rank.memory[name] for name in purposes]
            cells = map(readable_bytes, [*numbers, rank.total, rank.sent_bytes])
            rows.append((", ".join(map(str, rank.stages)), *cells))
        width = terminal_width()
        return text_table(rows, right=range(1, len(rows[0])), width=width)


def stage_table(plan: PipelinePlan) -> str:
    """Return a table of the stages, and the times of the schedule."""
    rows = [("stage", "rank", "parts", "parameters", "bytes", "work", "in flight", "idle")]
    for stage in plan.stages:
        stored = sum(parameter.bytes(parameter.stored) for parameter in stage.plan.parameters.values())
        rows.append(
            (
                str(stage.index),
                str(stage.rank),
                stage.parts,
                f"{stage.num_parameters:,}",
                readable_bytes(stored),
                f"{stage.work:.2f}",
                str(plan.max_in_flight(stage.rank)[stage.index]),
                f"{plan.timeline.idle(stage.rank):.1%}",
            )
        )
    width = terminal_width()
    table = text_table(rows, right=[1, 3, 4, 5, 6, 7], width=width)
    return "\n".join([table, *(paragraph(line, width=width) for line in schedule_lines(plan))])


def schedule_lines(plan: PipelinePlan) -> list[str]:
    """Say how long ranks wait, and which is the slowest."""
    options, rank = plan.options, plan.slowest
    stages = plan.stages_of(rank)
    names = f"stage{'s' * (len(stages) > 1)} {' and '.join(str(stage.index) for stage in stages)}"
    return [
        f"Schedule {options.schedule}, {options.num_micro_batches} micro-batches: a rank is idle for "
        f"{plan.timeline.bubble:.1%} of a step on average (the bubble), {plan.smallest_bubble:.1%} if all stages had "
        "the same work. Messages and collectives are taken to need no time.",
        f"Most work: {names}, {plan.work(rank):.2f} times the mean of the ranks.",
    ]


class Tokens(NamedTuple):
    """Tokens of a step over all ranks: number of sequences, and of the tokens of each."""

    batch_size: int
    sequence_length: int


def message_bytes(module: nn.Module, plan: Plan, tokens: Tokens, num_micro_batches: int) -> int:
    """Count the bytes of the hidden states that a rank passes to the next stage for one micro-batch."""
    largest = micro_batch_sizes(plan, *tokens, num_micro_batches)[0]
    inputs = torch.empty(local_tokens(plan, largest, tokens.sequence_length), dtype=torch.int64)
    boundary = Boundary(module, plan)
    message = boundary.local_part(boundary.hidden_states(MicroBatch(inputs, None, {})))
    return message.nbytes


def rank_memory(
    pipeline: PipelinePlan,
    rank: int,
    tokens: Tokens,
    message: int,
    num_chunks: int,
    optimizer: str,
    matrices: Collection[str],
    dtypes: StateDtypes,
) -> dict[str, int]:
    """Count the bytes of a rank by purpose, when the micro-batches in flight take the most.

    torch gathers the parameters of all stages of a rank before it frees them, and keeps the gradients of whole
    parameters until the last backward of a stage, also where FSDP2 would reduce them after each backward.
    """
    stages = pipeline.stages_of(rank)
    stored = [stored_memory(stage.plan, optimizer, matrices, dtypes) for stage in stages]
    memory = {name: sum(part[name] for part in stored) for name in stored[0]}
    unsharded = {stage.index: unsharded_memory(stage.plan) for stage in stages}
    memory["unsharded gradients"] = pipeline.gradient_peak(rank, unsharded)
    units = max(unit_memory(stage.plan) for stage in stages)
    memory["gathered parameters"] = sum(sorted(unsharded.values())[-NUM_AHEAD:]) + units
    kept, recomputed = {}, 0
    for stage in stages:
        largest = micro_batch_sizes(stage.plan, *tokens, pipeline.options.num_micro_batches)[0]
        saved, again = activation_memory(stage.plan, largest, tokens.sequence_length, num_chunks)
        # The engine holds the output of a stage until its backward. On the same rank, it is the input of the next one.
        has_output = _rank_of(pipeline, stage.index + 1) is not None
        is_local = _rank_of(pipeline, stage.index - 1) == rank
        kept[stage.index] = saved + message * (has_output - is_local)
        recomputed = max(recomputed, again)
    return {**memory, "activations": pipeline.peak(rank, kept), "recomputed activations": recomputed}


def messages(pipeline: PipelinePlan, rank: int, message: int) -> Iterator[PlannedCollective]:
    """List the messages that a rank sends to other ranks along the axis `stage` in a step."""
    for stage in pipeline.stages_of(rank):
        for other, purpose in ((stage.index + 1, "hidden states to stages"), (stage.index - 1, "gradients to stages")):
            if _rank_of(pipeline, other) not in (None, rank):
                for _ in range(pipeline.options.num_micro_batches):
                    yield PlannedCollective(purpose, "send", (STAGE_AXIS,), message)


def rank_communication(
    pipeline: PipelinePlan, rank: int, tokens: Tokens, message: int, num_chunks: int
) -> Iterator[PlannedCollective]:
    """List the messages and collectives of a rank in a step, without those of the optimizer.

    The parameters that FSDP2 does not manage are gathered for every micro-batch, and their gradients are reduced after
    every backward.
    """
    yield from messages(pipeline, rank, message)
    kind, count = schedule_kind(pipeline.options.schedule), pipeline.options.num_micro_batches
    gathers = fsdp_gathers(pipeline.order[rank], kind)
    for stage in pipeline.stages_of(rank):
        for item in parameter_communication(stage.plan, num_chunks):
            times = count if item.bucket is None else gathers[stage.index].get(item.purpose, 1)
            for number in range(times):
                yield item._replace(bucket=None if item.bucket is None else f"{stage.index} {item.bucket} {number}")
        for size in micro_batch_sizes(stage.plan, *tokens, count):
            yield from activation_communication(stage.plan, size, tokens.sequence_length, parameter_dtype(stage.plan))
            dispatched = dispatch_communication(stage.plan, size, tokens.sequence_length, num_chunks)
            yield from (item for _, item in dispatched)


def rank_parameters(pipeline: PipelinePlan, rank: int) -> Plan:
    """Return a plan with the parameters of all stages of a rank, which one optimizer has."""
    stages = pipeline.stages_of(rank)
    modules = {f"{stage.index}.{path}": planned for stage in stages for path, planned in stage.plan.items()}
    return replace(stages[0].plan, modules=modules)


def _rank_of(pipeline: PipelinePlan, stage: int) -> int | None:
    return pipeline.stages[stage].rank if 0 <= stage < len(pipeline.stages) else None
