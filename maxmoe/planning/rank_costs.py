"""Memory and communication of the ranks along the axis `stage`; one without stages."""

from collections.abc import Collection, Iterator
from dataclasses import replace

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
    gathered_memory,
    stored_memory,
    unit_memory,
    unsharded_memory,
)
from maxmoe.planning.planned_batch import PlannedBatch
from maxmoe.sharding.mesh import STAGE_AXIS
from maxmoe.sharding.planned_collective import PlannedCollective


def message_bytes(module: nn.Module, batch: PlannedBatch) -> int:
    """Count the bytes of the hidden states that a rank passes to the next stage for a micro-batch."""
    boundary = Boundary(module, batch.plan)
    inputs = torch.empty(batch.local_tokens, dtype=torch.int64)
    return boundary.local_part(boundary.hidden_states(MicroBatch(inputs, None, {}))).nbytes


def rank_memory(
    pipeline: PipelinePlan,
    rank: int,
    batch: PlannedBatch,
    message: int,
    optimizer: str,
    matrices: Collection[str],
    dtypes: StateDtypes,
) -> dict[str, int]:
    """Count the bytes of a rank by purpose, when the micro-batches in flight take the most.

    With stages, torch gathers the parameters of all stages of a rank before it frees them, and keeps the gradients of
    whole parameters until the last backward of a stage, also where FSDP2 would reduce them after each backward.
    """
    stages = pipeline.stages_of(rank)
    stored = [stored_memory(stage.plan, optimizer, matrices, dtypes) for stage in stages]
    memory = {name: sum(part[name] for part in stored) for name in stored[0]}
    if len(pipeline.stages) == 1:
        memory["gathered parameters"] = gathered_memory(batch.plan)
    else:
        unsharded = {stage.index: unsharded_memory(stage.plan) for stage in stages}
        memory["unsharded gradients"] = pipeline.gradient_peak(rank, unsharded)
        units = max(sum(unit_memory(stage.plan)) for stage in stages)
        memory["gathered parameters"] = sum(sorted(unsharded.values())[-NUM_AHEAD:]) + units
    kept, recomputed = {}, 0
    for stage in stages:
        largest = next(replace(batch, plan=stage.plan).micro_batches(pipeline.options.num_micro_batches))
        saved, again = activation_memory(largest)
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
    pipeline: PipelinePlan, rank: int, batch: PlannedBatch, message: int
) -> Iterator[PlannedCollective]:
    """List the messages and collectives of a rank in a step, without those of the optimizer.

    The parameters that FSDP2 does not manage are gathered for every micro-batch, and their gradients are reduced after
    every backward.
    """
    yield from messages(pipeline, rank, message)
    count = pipeline.options.num_micro_batches
    gathers = fsdp_gathers(pipeline.order[rank], schedule_kind(pipeline.options.schedule))
    for stage in pipeline.stages_of(rank):
        for item in parameter_communication(stage.plan, batch.num_chunks):
            times = count if item.bucket is None else gathers[stage.index].get(item.purpose, 1)
            for number in range(times):
                yield item._replace(bucket=None if item.bucket is None else f"{stage.index} {item.bucket} {number}")
        for micro_batch in replace(batch, plan=stage.plan).micro_batches(count):
            yield from activation_communication(micro_batch)
            yield from dispatch_communication(micro_batch)


def rank_parameters(pipeline: PipelinePlan, rank: int) -> Plan:
    """Return a plan with the parameters of all stages of a rank, which one optimizer has."""
    stages = pipeline.stages_of(rank)
    modules = {f"{stage.index}.{path}": planned for stage in stages for path, planned in stage.plan.items()}
    return replace(stages[0].plan, modules=modules)


def _rank_of(pipeline: PipelinePlan, stage: int) -> int | None:
    return pipeline.stages[stage].rank if 0 <= stage < len(pipeline.stages) else None
