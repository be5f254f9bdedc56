"""Memory per rank and bytes communicated per training step, without running a step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.checks.fields import check_number
from maxmoe.optim.muon_communication import muon_communication
from maxmoe.optim.newton_schulz import fast_dtype
from maxmoe.optim.parameter_groups import choose
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.plan import Plan
from maxmoe.pipelining.fsdp_gathers import fsdp_gathers
from maxmoe.pipelining.pipeline_plan import PipelinePlan, pipeline_options, plan_model, without_stages
from maxmoe.pipelining.schedules import schedule_kind
from maxmoe.planning.communication import (
    Traffic,
    activation_communication,
    dispatch_communication,
    parameter_communication,
    traffic_of,
)
from maxmoe.planning.memory import (
    MIXED_PRECISION,
    StateDtypes,
    activation_memory,
    parameter_dtype,
    part_memory,
    rank_memory,
    stored_memory,
)
from maxmoe.planning.planned_batch import PlannedBatch, check_sequence_length, message_bytes
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh
from maxmoe.sharding.planned_collective import PlannedCollective
from maxmoe.sharding.rules import LogicalRules
from maxmoe.text_table import readable_bytes, report

Optimizer = Literal["adamw", "muon"]
SHORT = {"unsharded gradients": "unsharded", "gathered parameters": "gathered", "recomputed activations": "recomputed"}


@dataclass(frozen=True)
class RankEstimate:
    """Memory of a rank along the axis `stage`, and its messages.

    Args:
        stages: stages of the rank.
        memory: bytes by purpose, when the micro-batches in flight take the most. "recomputed activations" belong to the
            module with the most. "unsharded gradients" are gradients of whole parameters in stages, which FSDP2 keeps
            until the end of the step.
        sent_bytes: bytes that the rank sends to the ranks of other stages in a step.
    """

    stages: tuple[int, ...]
    memory: dict[str, int]
    sent_bytes: int

    @property
    def total(self) -> int:
        """Bytes of all purposes."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Estimate:
    """Result of `estimate`. As a string, tables as wide as the terminal.

    Args:
        ranks: memory of each rank along the axis `stage`; one without stages.
        traffic: collectives per step of the rank that needs the most memory, without the all-reduces of losses,
            statistics and the gradient norm.
        uncounted: what is not counted, because the forward of the module cannot be traced; None if all is.
    """

    ranks: tuple[RankEstimate, ...]
    traffic: tuple[Traffic, ...]
    uncounted: str | None = None

    @property
    def largest(self) -> int:
        """Rank along the axis `stage` that needs the most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose of the rank that needs the most memory."""
        return self.ranks[self.largest].memory

    def __str__(self) -> str:
        has_stages = len(self.ranks) > 1
        where = f"of rank {self.largest} along stage" if has_stages else "per rank"
        memory = [(f"memory {where}", "bytes")]
        memory += [(name, readable_bytes(count)) for name, count in self.memory.items()]
        memory.append(("total", readable_bytes(sum(self.memory.values()))))
        heading = f"messages and collectives {where}, per step" if has_stages else "collectives per step"
        traffic = [(heading, "kind", "axis", "times", "bytes sent per rank")]
        traffic += [(*row[:3], str(row.times), readable_bytes(row.bytes)) for row in self.traffic]
        total = readable_bytes(sum(row.bytes for row in self.traffic))
        traffic.append(("total", "", "", str(sum(row.times for row in self.traffic)), total))
        return report([self.uncounted or "", *([self._table()] if has_stages else []), memory, traffic])

    def _table(self) -> list[tuple[str, ...]]:
        """Return the rows of a table of all ranks, without the columns of what no rank has."""
        purposes = [name for name in self.memory if any(rank.memory[name] for rank in self.ranks)]
        first = "stages" if len(self.ranks[0].stages) > 1 else "stage"
        rows: list[tuple[str, ...]] = [(first, *(SHORT.get(name, name) for name in purposes), "total", "sent")]
        for rank in self.ranks:
            numbers = [*(rank.memory[name] for name in purposes), rank.total, rank.sent_bytes]
            rows.append((", ".join(map(str, rank.stages)), *map(readable_bytes, numbers)))
        return rows


def estimate(
    module: nn.Module,
    mesh: Mesh,
    rules: LogicalRules | str = "default",
    *,
    batch_size: int,
    sequence_length: int,
    optimizer: Optimizer = "adamw",
    dispatch: Dispatch = "auto",
    num_chunks: int = 1,
    imbalance: float = 1.0,
    allow_unused: bool = False,
    schedule: str = "1f1b",
    num_micro_batches: int | None = None,
    blocks_per_stage: Sequence[int] | None = None,
    stages_per_rank: int | None = None,
    state_dtypes: StateDtypes = MIXED_PRECISION,
) -> Estimate:
    """Estimate the memory per rank and the communication per training step of a module on a mesh.

    Gradients have the dtype of the parameters, master weights of narrower parameters and moments are float32, unless
    `state_dtypes` has other dtypes. AdamW keeps two elements per parameter element and does not communicate. Muon keeps
    one for the parameters that `maxmoe.optim.parameter_groups` assigns to it, and communicates sharded matrices in its
    default dtype on the device of the parameters.

    Activations are those that modules declare, see `saved_tensors` of `Declaration`. What others save is traced in one
    forward of the module without values, in train mode, with the tokens of a rank: ids ``(B, S)`` or hidden states
    ``(B, S, D)``, or the `example_inputs` of its declaration. If that fails, the first line of the result says so.

    Every weight is counted as gathered in the forward and again in the backward, also an untied embedding, which is
    gathered once. Only one recomputed module (see `maxmoe.set_recompute`) is in memory at a time. Routing is assumed
    to be balanced: every expert gets equally many tokens from every rank.

    On a mesh with an axis `stage`, the result has the costs of every rank along it. Receive buffers, and the gradients
    that a split backward keeps between its halves, are not counted.

    Args:
        module: module before `maxmoe.parallelize`, on any device, including meta, with parameters of one dtype.
        mesh: mesh of real or planned ranks.
        rules: table of rules, or the name of a preset.
        batch_size: number of sequences per step, over all ranks.
        sequence_length: number of tokens per sequence.
        optimizer: optimizer whose state and collectives are counted.
        dispatch: strategy for experts on other ranks, as for `maxmoe.parallelize`.
        num_chunks: number of chunks of the tokens of a MoE layer.
        imbalance: with dispatch="least_loaded", number of rows of the rank with the most rows over the mean, before
            experts are moved; one expert has all rows above an even load. Each collective then has the bytes of the
            rank that sends or receives most.
        allow_unused: accept rules and mesh axes without effect.
        schedule: schedule of the pipeline stages, as for `maxmoe.pipeline`.
        num_micro_batches: number of micro-batches of a step; None to estimate the whole model, without pipeline stages,
            also on a mesh with an axis `stage`.
        blocks_per_stage: number of blocks of each stage, as for `maxmoe.pipeline`.
        stages_per_rank: number of stages of each rank, as for `maxmoe.pipeline`.
        state_dtypes: dtypes of gradients, master weights and moments.

    Raises:
        ValueError: as `parameter_shardings` and `maxmoe.pipeline`; for another optimizer; for parameters of several
            dtypes; for an empty batch; for longer sequences than the module declares (`max_sequence_length`); if axes
            that shard the tokens do not divide them.
    """
    if optimizer not in get_args(Optimizer):
        raise ValueError(f"optimizer must be one of {', '.join(get_args(Optimizer))}, got {optimizer!r}")
    module, rules = planned_copy(module), LogicalRules.load(rules)
    choices = choose(module, {}) if optimizer == "muon" else ()
    options = pipeline_options(schedule, num_micro_batches, blocks_per_stage, stages_per_rank)
    plan, stages = plan_model(
        module, mesh, rules, options, dispatch=dispatch, num_chunks=num_chunks, allow_unused=allow_unused
    )
    plan = with_imbalance(plan, imbalance, has_stages=stages is not None)
    pipeline = without_stages(plan) if stages is None else stages
    check_sequence_length(module, sequence_length)
    batch = PlannedBatch(plan, batch_size, sequence_length, parameter_dtype(plan), num_chunks)
    largest = next(batch.micro_batches(pipeline.options.num_micro_batches))
    message = 0 if stages is None else message_bytes(module, largest)
    matrices = {choice.name for choice in choices if choice.matrix is not None}
    count_state = partial(stored_memory, optimizer=optimizer, matrices=matrices, dtypes=state_dtypes)
    ranks = []
    for rank in range(pipeline.num_ranks):
        memory = memory_of_rank(pipeline, rank, largest, message, count_state)
        sent = sum(item.bytes for item in messages(pipeline, rank, message))
        ranks.append(RankEstimate(tuple(stage.index for stage in pipeline.stages_of(rank)), memory, sent))
    costs = Estimate(tuple(ranks), ())
    stored = {name: each for stage in pipeline.stages_of(costs.largest) for name, each in stage.plan.parameters.items()}
    mine = [choice for choice in choices if choice.name in stored]
    communication = [
        *rank_communication(pipeline, costs.largest, batch, message),
        *muon_communication(plan.mesh, stored, mine, fast_dtype(next(module.parameters()).device)),
    ]
    parts = (replace(largest, plan=stage.plan) for stage in pipeline.stages)
    uncounted = next(filter(None, (part.trace().problem for part in parts)), None)
    return replace(costs, traffic=traffic_of(communication), uncounted=uncounted)


def with_imbalance(plan: Plan, imbalance: float, *, has_stages: bool) -> Plan:
    """Return a plan that assumes an imbalance in every layer; 1.0 for balanced routing."""
    check_number("imbalance", imbalance, at_least=1.0)
    if imbalance == 1.0:
        return plan
    if has_stages:
        raise ValueError(f"imbalance must be 1.0 with pipeline stages, got {imbalance}")
    for path, (_, dispatch) in plan.layers.items():
        num_ranks = dispatch.mesh.size(*dispatch.group_axes)
        if not dispatch.strategy_class.moves_experts:
            raise ValueError(
                f"imbalance ({imbalance}) needs dispatch='least_loaded' and tokens that are sent, got "
                f"{dispatch.strategy!r} with tokens sent over {dispatch.token_axes} in {path or 'the layer'}: other "
                "strategies are planned for balanced routing"
            )
        if imbalance > num_ranks:
            raise ValueError(
                f"imbalance must be at most the number of ranks that share the experts ({num_ranks}), got {imbalance}"
            )
    modules = dict(plan)
    for path, module in plan.items():
        if module.dispatch is not None:
            modules[path] = replace(module, dispatch=replace(module.dispatch, imbalance=imbalance))
    return replace(plan, modules=modules)


def memory_of_rank(
    pipeline: PipelinePlan, rank: int, batch: PlannedBatch, message: int, count_state: Callable[[Plan], dict[str, int]]
) -> dict[str, int]:
    """Count the bytes of a rank by purpose, when the micro-batches in flight, each of the size `batch`, take the most.

    `count_state` counts parameters, gradients and optimizer state; `message` has the bytes that a stage sends.
    """
    stages, has_stages = pipeline.stages_of(rank), len(pipeline.stages) > 1
    parts = {each.index: part_memory(each.plan, count_state(each.plan), has_stages=has_stages) for each in stages}
    unsharded = {index: part.unsharded for index, part in parts.items()}
    kept, recomputed = {}, 0
    for stage in stages:
        saved, again = activation_memory(replace(batch, plan=stage.plan))
        # The engine holds the output of a stage until its backward. On the same rank, it is the input of the next one.
        has_output = _rank_of(pipeline, stage.index + 1) is not None
        is_local = _rank_of(pipeline, stage.index - 1) == rank
        kept[stage.index] = saved + message * (has_output - is_local)
        recomputed = max(recomputed, again)
    gradients = pipeline.gradient_peak(rank, unsharded) if has_stages else None
    return rank_memory([[part] for part in parts.values()], pipeline.peak(rank, kept), recomputed, gradients)


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
    """List the messages and collectives of a rank in a step, without the collectives of the optimizer.

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


def _rank_of(pipeline: PipelinePlan, stage: int) -> int | None:
    return pipeline.stages[stage].rank if 0 <= stage < len(pipeline.stages) else None
