"""Predicted time and memory of a training step with one plan."""

import functools
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.declaration import declaration_of
from maxmoe.nn import recompute_of, set_recompute
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.pipelining.schedules import check_schedule
from maxmoe.planning.communication import activation_communication, dispatch_communication, parameter_communication
from maxmoe.planning.device import Device
from maxmoe.planning.memory import (
    PARAMETER_DTYPES,
    StateDtypes,
    activation_memory,
    gathered_memory,
    parameter_dtype,
    stored_memory,
    unit_memory,
    unsharded_memory,
)
from maxmoe.planning.model_parts import FIRST, LAST, ModelParts, StageKind
from maxmoe.planning.saved_tensors import local_tokens, local_trace, micro_batch_sizes
from maxmoe.planning.step_time import Sent, computed, sent
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh
from maxmoe.sharding.planned_collective import PlannedCollective
from maxmoe.sharding.rules import LogicalRules


@dataclass(frozen=True, kw_only=True)
class PredictedPlan:
    """A plan and its predicted costs, on the rank that takes most time or needs most memory.

    Args:
        rules: the rules, or the name of their preset or file.
        mesh: size of each axis larger than one, the outermost first.
        dispatch: strategy for experts on other ranks.
        num_chunks: number of chunks of the tokens of a MoE layer.
        recompute: names of the parts that are recomputed in the backward.
        num_micro_batches: number of micro-batches of a step; one without pipeline stages.
        memory: bytes of the rank that needs most.
        compute: seconds of products, memory traffic and the optimizer.
        hidden: seconds of communication that runs beside products.
        exposed: seconds of all other communication.
        bubble: seconds in which the rank waits for other stages.
        flops: floating-point operations of a step.
        model_flops: floating-point operations of a step without recomputation.
        mfu: `model_flops` per second of the step, as a share of the peak of the device: the model FLOPs utilization.
        intra_bytes: bytes that the rank sends within its node in a step.
        inter_bytes: bytes that it sends to other nodes in a step.
        uncounted: what is not counted, because the forward of the module cannot be traced; None if all is.
    """

    rules: LogicalRules | str
    mesh: dict[str, int]
    dispatch: Dispatch
    num_chunks: int
    recompute: tuple[str, ...]
    num_micro_batches: int
    memory: int
    compute: float
    hidden: float
    exposed: float
    bubble: float
    flops: float
    model_flops: float
    mfu: float
    intra_bytes: int
    inter_bytes: int
    uncounted: str | None = None

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.compute + self.exposed + self.bubble

    @property
    def has_stages(self) -> bool:
        """Whether the plan cuts the model into pipeline stages."""
        return STAGE_AXIS in self.mesh

    @property
    def call(self) -> str:
        """Python code that runs a `model` with the plan."""
        rules = repr(self.rules) if isinstance(self.rules, str) else "rules"
        options = [f"Mesh({self.mesh or {'data': 1}})", rules, f"dispatch={self.dispatch!r}"]
        if self.num_chunks > 1:
            options.append(f"num_chunks={self.num_chunks}")
        options.append(f"recompute={self.recompute!r}")
        if not self.has_stages:
            return f"model = maxmoe.parallelize(model, {', '.join(options)})"
        options.append(f'schedule="1f1b", num_micro_batches={self.num_micro_batches}')
        return f"pipeline = maxmoe.pipeline(model, {', '.join(options)}, loss=loss)"


class Step(NamedTuple):
    """What a step computes.

    Attributes:
        batch_size: number of sequences over all ranks.
        sequence_length: number of tokens of each sequence.
        dtype: dtype of the activations.
        state_dtypes: dtypes of gradients, master weights and moments.
    """

    batch_size: int
    sequence_length: int
    dtype: torch.dtype
    state_dtypes: StateDtypes


class StoredCost(NamedTuple):
    """Memory of a part of a model that does not depend on the tokens: bytes of a rank.

    Attributes:
        stored: parameters, gradients and optimizer state.
        unsharded: parameters that FSDP2 gathers.
        unit: parameters that the largest FSDP unit gathers without FSDP2.
    """

    stored: int
    unsharded: int
    unit: int


class PartCost(NamedTuple):
    """Time of a part of a model for one micro-batch, in seconds.

    Attributes:
        compute: products and memory traffic.
        hidden: collectives that run beside products.
        exposed: all other collectives.
        flops: floating-point operations.
        model_flops: floating-point operations without recomputation.
        sent: collectives, hidden or not.
        reduction: collectives that run once per step: FSDP2 reduces gradients.
    """

    compute: float = 0.0
    hidden: float = 0.0
    exposed: float = 0.0
    flops: float = 0.0
    model_flops: float = 0.0
    sent: Sent = Sent()
    reduction: Sent = Sent()

    @property
    def seconds(self) -> float:
        """Time of a micro-batch."""
        return self.compute + self.exposed


class MeshCosts:
    """Costs of a model on one mesh with rules and a strategy, with the parts recomputed that `parts.reduced` has set.

    Raises a ValueError where `maxmoe.parallelize` does.
    """

    def __init__(
        self, parts: ModelParts, step: Step, device: Device, mesh: Mesh, rules: LogicalRules, dispatch: Dispatch
    ) -> None:
        self.step, self.device, self.mesh, self.parts = step, device, mesh, parts
        within = mesh.within_stage()
        self.plan, self._plans = parts.plans(
            lambda module: make_plan(module, within, rules, dispatch=dispatch, allow_unused=True),
            has_stages=mesh.size(STAGE_AXIS) > 1,
        )
        self.rows, _ = local_tokens(self.plan, step.batch_size, step.sequence_length)
        self.stages: list[StageKind] = parts.stages(mesh.size(STAGE_AXIS))
        self._stored = {
            name: StoredCost(
                sum(stored_memory(plan, "adamw", (), step.state_dtypes).values()),
                unsharded_memory(plan),
                unit_memory(plan),
            )
            for name, plan in self._plans.items()
        }
        self._parameters = functools.cache(self._parameter_costs)

    @property
    def least_memory(self) -> float:
        """Mean over the stages of the bytes of parameters, gradients and optimizer state."""
        stored = (self._total_stored(stage) * stage.number for stage in self.stages)
        return sum(stored) / sum(stage.number for stage in self.stages)

    def memory(self, num_micro_batches: int) -> int:
        """Return the bytes of the rank that needs most, with one chunk."""
        size = self._micro_batch(num_micro_batches)
        kept, recomputed = {}, {}
        for name, plan in self._plans.items():
            length, dtype = self.step.sequence_length, self.step.dtype
            kept[name], recomputed[name] = activation_memory(plan, size, length, 1, dtype)
        num_stages = self.mesh.size(STAGE_AXIS)
        largest = 0
        for stage in self.stages:
            saved = sum(kept[name] * count for name, count in stage.parts.items())
            memory = self._total_stored(stage) + max(recomputed[name] for name in stage.parts)
            if num_stages == 1:
                return memory + saved + gathered_memory(self.plan)
            # The gradients of whole parameters, and the parameters that torch gathers ahead.
            memory += 2 * sum(self._stored[name].unsharded * count for name, count in stage.parts.items())
            units = {name: self._stored[name].unit for name in stage.parts}
            memory += units.pop(FIRST, 0) + units.pop(LAST, 0) + max(units.values(), default=0)
            in_flight = min(num_micro_batches, num_stages - stage.rank)
            message = 0 if stage.rank == num_stages - 1 else self._message(size)
            largest = max(largest, memory + in_flight * (saved + message))
        return largest

    def seconds(self, num_micro_batches: int, num_chunks: int) -> float:
        """Return the time of a step."""
        times = self.times(num_micro_batches, num_chunks)
        return float(times["compute"] + times["exposed"] + times["bubble"])

    def times(self, num_micro_batches: int, num_chunks: int) -> dict[str, Any]:
        """Return the costs of a `PredictedPlan`, except its memory.

        With stages, the schedule is 1F1B with one stage per rank:

            seconds = sum of the stages' times of a micro-batch + (M - 1) * the longest of them
                      + reductions and update of the slowest stage
        """
        device, has_stages = self.device, self.mesh.size(STAGE_AXIS) > 1
        many = num_micro_batches if has_stages else 1
        size = self._micro_batch(many)
        parts = {name: self._part(name, size, num_chunks) for name in self._plans}
        costs = [_total((parts[name], count) for name, count in stage.parts.items()) for stage in self.stages]
        message = PlannedCollective("hidden states to stages", "send", (STAGE_AXIS,), self._message(size))
        messages = sent([message, message], self.mesh, device) if has_stages else Sent()
        slowest = max(range(len(costs)), key=lambda index: costs[index].seconds)
        cost, stage = costs[slowest], self.stages[slowest]
        fill = sum(
            (each.seconds + messages.seconds) * kind.number for each, kind in zip(costs, self.stages, strict=True)
        )
        update = 2 * self._total_stored(stage) / device.memory_bandwidth * device.slowdown(self.mesh.num_ranks)
        # FSDP2 reduces gradients beside the backward; with stages, after the last one.
        beside = 0.0 if has_stages else device.overlap * min(cost.reduction.seconds, cost.compute - cost.hidden)
        moved = (cost.sent + messages) * many + cost.reduction
        result = {
            "compute": cost.compute * many + update,
            "hidden": cost.hidden * many + beside,
            "exposed": (cost.exposed + messages.seconds) * many + cost.reduction.seconds - beside,
            "bubble": fill - cost.seconds - messages.seconds if has_stages else 0.0,
            "flops": cost.flops * many,
            "model_flops": cost.model_flops * many,
            "intra_bytes": int(moved.intra_bytes),
            "inter_bytes": int(moved.inter_bytes),
        }
        seconds = result["compute"] + result["exposed"] + result["bubble"]
        return result | {"mfu": result["model_flops"] / seconds / device.peak(self.step.dtype)}

    def _micro_batch(self, num_micro_batches: int) -> int:
        """Return the number of sequences of the largest micro-batch over all ranks."""
        return micro_batch_sizes(self.plan, self.step.batch_size, self.step.sequence_length, num_micro_batches)[0]

    def _message(self, micro_batch: int) -> int:
        """Return the bytes of the hidden states of a micro-batch on a rank, which stages send to each other."""
        stream = declaration_of(self.parts.model).residual_stream
        if stream is None:
            return 0
        rows, length = local_tokens(self.plan, micro_batch, self.step.sequence_length)
        elements = rows * length * stream.hidden_size // self.plan.mesh.size(*self.plan.embed_axes)
        return elements * self.step.dtype.itemsize

    def _total_stored(self, stage: StageKind) -> int:
        return sum(self._stored[name].stored * count for name, count in stage.parts.items())

    def _parameter_costs(self, name: str, num_chunks: int) -> tuple[Sent, Sent, Sent]:
        """Return the costs of the gathers and of the reductions of FSDP2, and of the collectives of other units."""
        groups: tuple[list[PlannedCollective], ...] = ([], [], [])
        for item in parameter_communication(self._plans[name], num_chunks):
            groups[2 if item.bucket is None else item.purpose == "gradients of weights"].append(item)
        gathered, reduced, others = (sent(group, self.mesh, self.device) for group in groups)
        return gathered, reduced, others

    def _part(self, name: str, micro_batch: int, num_chunks: int) -> PartCost:
        """Compute the time of a part for a micro-batch."""
        plan, device, mesh = self._plans[name], self.device, self.mesh
        size, dtype = (micro_batch, self.step.sequence_length), self.step.dtype
        compute, slowdown = computed(plan, *size, num_chunks, dtype, device), device.slowdown(mesh.num_ranks)
        overhead = device.sharded_block_overhead if mesh.num_ranks > 1 else device.block_overhead
        seconds = (compute.seconds + overhead * (name not in (FIRST, LAST))) * slowdown
        gathered, reduction, others = self._parameters(name, num_chunks)
        dispatched = sent((item for _, item in dispatch_communication(plan, *size, num_chunks)), mesh, device)
        moved = gathered + others + dispatched + sent(activation_communication(plan, *size, dtype), mesh, device)
        # The first chunk arrives, and the last one returns, while no expert computes.
        beside = (1 - 1 / num_chunks) * min(dispatched.seconds, compute.routed_seconds * slowdown)
        hidden = device.overlap * (beside + min(gathered.seconds, seconds - beside))
        return PartCost(
            compute=seconds,
            hidden=hidden,
            exposed=moved.seconds - hidden,
            flops=compute.flops,
            model_flops=compute.model_flops,
            sent=moved,
            reduction=reduction,
        )


def _total(parts: Iterable[tuple[PartCost, int]]) -> PartCost:
    """Add up the costs of parts, each times a number."""
    rows = [[value * count for value in part] for part, count in parts]
    return PartCost(*(functools.reduce(operator.add, column) for column in zip(*rows, strict=True)))


def predict(
    module: nn.Module,
    mesh: Mesh,
    rules: LogicalRules | str,
    device: Device | str,
    *,
    batch_size: int,
    sequence_length: int,
    dispatch: Dispatch = "auto",
    num_chunks: int = 1,
    recompute: Collection[str] | None = None,
    num_micro_batches: int = 1,
    state_dtypes: StateDtypes = PARAMETER_DTYPES,
) -> PredictedPlan:
    """Predict the time and the memory of a training step with one plan, by the model in docs/planning.md.

    Args:
        module: module before `maxmoe.parallelize`, on any device, including meta, with parameters of one dtype.
        mesh: mesh of real or planned ranks; ranks of a node are neighbours along the last axes.
        rules: table of rules, or the name of a preset.
        device: device and network: a `Device`, the name of one, or a YAML file.
        batch_size: number of sequences per step, over all ranks.
        sequence_length: number of tokens per sequence.
        dispatch: strategy for experts on other ranks, as for `maxmoe.parallelize`.
        num_chunks: number of chunks of the tokens of a MoE layer.
        recompute: names of the parts that are recomputed in the backward; None for the setting of the module.
        num_micro_batches: number of micro-batches on a mesh with an axis `stage`, with the schedule 1F1B.
        state_dtypes: dtypes of gradients, master weights and moments.

    Returns:
        The plan with its costs.

    Raises:
        ValueError: as `estimate`; for an unknown device, and one without a peak in the dtype of the parameters; for
            pipeline stages of a module that does not declare `pipeline_parts` and a `residual_stream`.
    """
    module, loaded, table = planned_copy(module), Device.load(device), LogicalRules.load(rules)
    one = make_plan(module, Mesh.planned({}), LogicalRules(), allow_unused=True)
    step = Step(batch_size, sequence_length, parameter_dtype(one), state_dtypes)
    parts = ModelParts(module)
    check_schedule("1f1b", mesh.size(STAGE_AXIS), None, num_micro_batches)
    if mesh.size(STAGE_AXIS) > 1 and not parts.can_be_cut:
        raise ValueError(
            f"{type(module).__name__} must declare pipeline_parts and a residual_stream to be planned with pipeline "
            f"stages, got {mesh}"
        )
    names = tuple(recompute_of(module) if recompute is None else recompute)
    set_recompute(parts.reduced, names)
    planned = Mesh.planned({axis: size for axis, size in mesh.sizes.items() if size > 1})
    costs = MeshCosts(parts, step, loaded, planned, table, dispatch)
    return PredictedPlan(
        rules=rules,
        mesh=planned.sizes,
        dispatch=dispatch,
        num_chunks=num_chunks,
        recompute=names,
        num_micro_batches=num_micro_batches,
        memory=costs.memory(num_micro_batches),
        uncounted=local_trace(one, batch_size, sequence_length).problem,
        **costs.times(num_micro_batches, num_chunks),
    )
