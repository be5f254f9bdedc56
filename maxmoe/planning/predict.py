"""Predicted time and memory of a training step with one plan."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.nn import recompute_of, set_recompute
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.plan import Plan
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.pipelining.schedules import check_schedule
from maxmoe.planning.communication import activation_communication, dispatch_communication, parameter_communication
from maxmoe.planning.device import Device
from maxmoe.planning.memory import (
    MIXED_PRECISION,
    StateDtypes,
    activation_memory,
    parameter_dtype,
    part_memory,
    rank_memory,
    stored_memory,
)
from maxmoe.planning.model_parts import FIRST, LAST, ModelParts, StageKind
from maxmoe.planning.planned_batch import PlannedBatch, check_sequence_length
from maxmoe.planning.step_time import Cost, computed, sent
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
        memory_parts: bytes of the rank that needs most, by purpose as in `Estimate.memory`.
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
    memory_parts: dict[str, int]
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
    def memory(self) -> int:
        """Bytes of the rank that needs most."""
        return sum(self.memory_parts.values())

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
    """Tokens and dtypes of a step.

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


class MeshCosts:
    """Costs of a model on one mesh with rules and a strategy, with the parts recomputed that `parts.reduced` has set.

    Raises a ValueError where `maxmoe.parallelize` does.
    """

    def __init__(
        self, parts: ModelParts, step: Step, device: Device, mesh: Mesh, rules: LogicalRules, dispatch: Dispatch
    ) -> None:
        self.step, self.device, self.mesh = step, device, mesh
        self._num_stages = mesh.size(STAGE_AXIS)
        has_stages = self._num_stages > 1
        self._stages = parts.stages(self._num_stages)
        make = partial(make_plan, mesh=mesh.within_stage(), rules=rules, dispatch=dispatch, allow_unused=True)
        self.plan, self._plans = parts.plans(make, has_stages=has_stages)
        self.rows, _ = self._micro_batch(self.plan).local_tokens
        self._sequence_bytes = parts.sequence_bytes(step.sequence_length) if has_stages else 0
        states = {name: stored_memory(plan, "adamw", (), step.state_dtypes) for name, plan in self._plans.items()}
        self._memory = {
            name: part_memory(plan, states[name], has_stages=has_stages) for name, plan in self._plans.items()
        }
        self._parameters = cache(self._parameter_costs)

    @property
    def least_memory(self) -> float:
        """Mean over the stages of the bytes of parameters, gradients and optimizer state."""
        return sum(self._stored(stage) * stage.number for stage in self._stages) / self._num_stages

    def memory(self, num_micro_batches: int, num_chunks: int) -> dict[str, int]:
        """Return the bytes of the rank that needs most, by purpose."""
        activations = {
            name: activation_memory(self._micro_batch(plan, num_micro_batches, num_chunks))
            for name, plan in self._plans.items()
        }
        message, last = self._message(num_micro_batches), self._num_stages - 1

        def memory(stage: StageKind) -> dict[str, int]:
            parts = [self._memory[name] for name in stage.parts.elements()]
            saved = sum(activations[name][0] for name in stage.parts.elements())
            in_flight = min(num_micro_batches, self._num_stages - stage.rank)
            kept = in_flight * (saved + message * (stage.rank < last))
            recomputed = max(activations[name][1] for name in stage.parts)
            return rank_memory([parts], kept, recomputed, sum(part.unsharded for part in parts) if last else None)

        return max(map(memory, self._stages), key=lambda found: sum(found.values()))

    def predicted(
        self,
        rules: LogicalRules | str,
        dispatch: Dispatch,
        recompute: tuple[str, ...],
        num_micro_batches: int,
        num_chunks: int,
        uncounted: str | None = None,
    ) -> PredictedPlan:
        """Return the plan with its costs; `recompute` names the parts that are recomputed now."""
        cost = self.cost(num_micro_batches, num_chunks)
        sent_bytes = {"intra_bytes": int(cost.intra_bytes), "inter_bytes": int(cost.inter_bytes)}
        return PredictedPlan(
            rules=rules,
            mesh=self.mesh.sizes,
            dispatch=dispatch,
            num_chunks=num_chunks,
            recompute=recompute,
            num_micro_batches=num_micro_batches,
            memory_parts=self.memory(num_micro_batches, num_chunks),
            mfu=cost.model_flops / cost.seconds / self.device.peak(self.step.dtype),
            uncounted=uncounted,
            **cost._asdict() | sent_bytes,
        )

    def cost(self, num_micro_batches: int, num_chunks: int) -> Cost:
        """Return the cost of a step on the rank that takes most time.

        With stages, the schedule is 1F1B with one stage per rank:

            seconds = sum of the stages' times of a micro-batch + (M - 1) * the longest of them
                      + reductions and update of the slowest stage
        """
        device, has_stages = self.device, self._num_stages > 1
        parts = {name: self._part(name, num_micro_batches, num_chunks) for name in self._plans}
        message = PlannedCollective("hidden states to stages", "send", (STAGE_AXIS,), self._message(num_micro_batches))
        messages = sent([message, message] if has_stages else [], self.mesh, device)
        costs = [sum((parts[name] * count for name, count in stage.parts.items()), messages) for stage in self._stages]
        slowest = max(range(len(costs)), key=lambda index: costs[index].seconds)
        cost, stage = costs[slowest], self._stages[slowest]
        reductions = (self._parameters(name, num_chunks)[1] * count for name, count in stage.parts.items())
        reduction = sum(reductions, Cost())
        # FSDP2 reduces gradients beside the backward; with stages, after the last one.
        beside = 0.0 if has_stages else device.overlap * min(reduction.seconds, cost.compute - cost.hidden)
        update = 2 * self._stored(stage) / device.memory_bandwidth * device.slowdown(self.mesh.num_ranks)
        bubble = sum(each.seconds * kind.number for each, kind in zip(costs, self._stages, strict=True)) - cost.seconds
        return cost * num_micro_batches + reduction.hide(beside) + Cost(compute=update, bubble=bubble)

    def _micro_batch(self, plan: Plan, num_micro_batches: int = 1, num_chunks: int = 1) -> PlannedBatch:
        """Return the largest micro-batch of a part."""
        batch_size, length, dtype, _ = self.step
        return next(PlannedBatch(plan, batch_size, length, dtype, num_chunks).micro_batches(num_micro_batches))

    def _message(self, num_micro_batches: int) -> int:
        """Return the bytes of the hidden states of a micro-batch on a rank, which stages send to each other."""
        rows, length = self._micro_batch(self.plan, num_micro_batches).local_tokens
        return (
            rows * length * self._sequence_bytes // self.step.sequence_length // self.mesh.size(*self.plan.embed_axes)
        )

    def _stored(self, stage: StageKind) -> int:
        """Return the bytes of parameters, gradients and optimizer state of a stage."""
        return sum(sum(self._memory[name].state.values()) * count for name, count in stage.parts.items())

    def _parameter_costs(self, name: str, num_chunks: int) -> tuple[Cost, Cost, Cost]:
        """Return the costs of the gathers and of the reductions of FSDP2, and of the collectives of other units."""
        groups: tuple[list[PlannedCollective], ...] = ([], [], [])
        for item in parameter_communication(self._plans[name], num_chunks):
            groups[2 if item.bucket is None else item.purpose == "gradients of weights"].append(item)
        gathered, reduced, others = (sent(group, self.mesh, self.device) for group in groups)
        return gathered, reduced, others

    def _part(self, name: str, num_micro_batches: int, num_chunks: int) -> Cost:
        """Return the cost of a part for a micro-batch, without the reductions of FSDP2."""
        device, mesh = self.device, self.mesh
        batch = self._micro_batch(self._plans[name], num_micro_batches, num_chunks)
        overhead = device.sharded_block_overhead if mesh.num_ranks > 1 else device.block_overhead
        compute, routed = computed(batch, 0.0 if name in (FIRST, LAST) else overhead, mesh, device)
        gathered, _, others = self._parameters(name, num_chunks)
        dispatched = sent(dispatch_communication(batch), mesh, device)
        moved = gathered + others + dispatched + sent(activation_communication(batch), mesh, device)
        # The first chunk arrives, and the last one returns, while no expert computes.
        beside = (1 - 1 / num_chunks) * min(dispatched.seconds, routed)
        return (compute + moved).hide(device.overlap * (beside + min(gathered.seconds, compute.seconds - beside)))


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
    state_dtypes: StateDtypes = MIXED_PRECISION,
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
        num_micro_batches: number of micro-batches on a mesh with an axis `stage`, with the schedule 1F1B; without
            pipeline stages, the whole batch is one.
        state_dtypes: dtypes of gradients, master weights and moments.

    Returns:
        The plan with its costs.

    Raises:
        ValueError: as `estimate`; for an unknown device, and one without a peak in the dtype of the parameters; for
            pipeline stages of a module that does not declare `pipeline_parts`.
    """
    check_sequence_length(module, sequence_length)
    parts, table = ModelParts(planned_copy(module)), LogicalRules.load(rules)
    batch = PlannedBatch(parts.on_one_rank, batch_size, sequence_length, parameter_dtype(parts.on_one_rank))
    step = Step(batch_size, sequence_length, batch.dtype, state_dtypes)
    check_schedule("1f1b", mesh.size(STAGE_AXIS), None, num_micro_batches)
    names = tuple(sorted(recompute_of(module)) if recompute is None else recompute)
    set_recompute(parts.reduced, names)
    planned = Mesh.planned({axis: size for axis, size in mesh.sizes.items() if size > 1})
    costs = MeshCosts(parts, step, Device.load(device), planned, table, dispatch)
    many = num_micro_batches if mesh.size(STAGE_AXIS) > 1 else 1
    return costs.predicted(rules, dispatch, names, many, num_chunks, batch.trace().problem)
