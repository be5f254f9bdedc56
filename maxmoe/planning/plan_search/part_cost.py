"""Costs of a part of a model on a rank: memory, products and collectives of one micro-batch."""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maxmoe.parallel.plan.plan import ModulePlan, Plan, enclosing
from maxmoe.planning.communication import activation_communication, dispatch_communication, parameter_communication
from maxmoe.planning.many_meshes import as_tensor
from maxmoe.planning.memory import activation_memory, activation_sizes, stored_memory, unit_memory, unsharded_memory
from maxmoe.planning.state_dtypes import StateDtypes
from maxmoe.planning.time_model.collective_time import CollectiveCost, Topology
from maxmoe.planning.time_model.compute_time import (
    PASSES_OF_RECOMPUTATION,
    PASSES_OVER_ACTIVATIONS,
    ComputeCost,
    computed,
)
from maxmoe.sharding.planned_collective import PlannedCollective


class Step(NamedTuple):
    """What a step computes.

    Attributes:
        batch_size: number of sequences over all ranks: of the optimizer step in `Evaluation.step`, elsewhere of the
            largest micro-batch.
        sequence_length: number of tokens of each sequence.
        num_chunks: number of chunks of the tokens of a MoE layer.
        dtype: dtype of the activations.
        state_dtypes: dtypes of gradients, master weights and moments.
    """

    batch_size: int
    sequence_length: int
    num_chunks: int
    dtype: torch.dtype
    state_dtypes: StateDtypes


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """Costs of a part; each tensor is ``(N,)``, one value for each mesh.

    Args:
        stored: bytes of parameters, gradients and optimizer state.
        compute: seconds of products and memory traffic.
        flops: floating-point operations.
        hidden: seconds of the collectives of a micro-batch that run beside products.
        exposed: seconds of all other collectives of a micro-batch.
        reduction: cost of the collectives that run once per step: FSDP2 reduces gradients.
        sent: cost of the collectives of a micro-batch, hidden or not.
        dispatched: seconds of `exposed` that more chunks could hide.
    """

    stored: Tensor
    compute: Tensor
    flops: Tensor
    hidden: Tensor
    exposed: Tensor
    reduction: CollectiveCost
    sent: CollectiveCost
    dispatched: Tensor

    @property
    def seconds(self) -> Tensor:
        """Time of a micro-batch."""
        return self.compute + self.exposed

    def select(self, mask: Tensor) -> "PartCost":
        """Return the costs in some of the meshes."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            values[name] = value.select(mask) if isinstance(value, CollectiveCost) else value[mask]
        return PartCost(**values)


class PartMemory(NamedTuple):
    """Memory of a part and one micro-batch; each tensor is ``(N,)``, one value for each mesh.

    Attributes:
        stored: bytes of parameters, gradients and optimizer state.
        unsharded: bytes of the parameters that FSDP2 gathers.
        unit: bytes of the parameters that the largest FSDP unit gathers without FSDP2.
        kept: bytes of the activations that are kept until the backward.
        recomputed: bytes of the activations of the largest recomputed module.
    """

    stored: Tensor
    unsharded: Tensor
    unit: Tensor
    kept: Tensor
    recomputed: Tensor

    def select(self, mask: Tensor) -> "PartMemory":
        """Return the memory in some of the meshes."""
        return PartMemory(*(each[mask] for each in self))


def part_memory(plan: Plan, parameters: "ParameterCost", step: Step, count: int) -> PartMemory:
    """Compute the memory of a plan of a block, or of the rest of a model, given the costs of its parameters."""
    kept, recomputed = activation_memory(plan, *step[:3], step.dtype)
    activations = as_tensor(kept, count), as_tensor(recomputed, count)
    return PartMemory(parameters.stored, parameters.unsharded, parameters.unit, *activations)


def part_plan(plan: Plan, path: str) -> Plan:
    """Return the plan of the module at a path, and of the modules in it."""
    inside = {name: module for name, module in plan.items() if name == path or name.startswith(f"{path}.")}
    around = {outer: ModulePlan(module=nn.Identity(), parameters={}) for outer in enclosing(path)[1:]}
    return replace(plan, modules={**around, **inside})


def rest_plan(plan: Plan, paths: tuple[str, ...]) -> Plan:
    """Return the plan without the modules at some paths, and those in them."""
    kept = {
        name: module
        for name, module in plan.items()
        if not any(name == path or name.startswith(f"{path}.") for path in paths)
    }
    return replace(plan, modules=kept)


@dataclass(frozen=True, kw_only=True)
class ParameterCost:
    """Costs of the parameters of a part; see `PartCost`.

    Args:
        stored: bytes of parameters, gradients and optimizer state.
        unsharded: bytes of the parameters that FSDP2 gathers.
        unit: bytes of the parameters that the largest FSDP unit gathers without FSDP2.
        gathered: cost of the all-gathers of FSDP2 for a micro-batch.
        reduction: cost of its reductions of gradients.
        others: cost of the collectives of other FSDP units for a micro-batch.
    """

    stored: Tensor
    unsharded: Tensor
    unit: Tensor
    gathered: CollectiveCost
    reduction: CollectiveCost
    others: CollectiveCost


def parameter_cost(plan: Plan, num_chunks: int, state_dtypes: StateDtypes, topology: Topology) -> ParameterCost:
    """Compute the costs of the parameters of a plan."""
    collectives, count = list(parameter_communication(plan, num_chunks)), topology.count
    return ParameterCost(
        stored=as_tensor(sum(stored_memory(plan, "adamw", (), state_dtypes).values()), count),
        unsharded=as_tensor(unsharded_memory(plan), count),
        unit=as_tensor(unit_memory(plan), count),
        gathered=topology.sent(_fsdp(collectives, is_reduction=False)),
        reduction=topology.sent(_fsdp(collectives, is_reduction=True)),
        others=topology.sent([item for item in collectives if item.bucket is None]),
    )


def compute_seconds(plan: Plan, step: Step, topology: Topology, *, is_block: bool) -> tuple[Tensor, ComputeCost]:
    """Return the time of products and memory traffic of a plan, and its products."""
    device, count = topology.device, topology.count
    products = computed(plan, *step[:3], device, step.dtype, count)
    traffic = torch.zeros(count, dtype=torch.float64)
    for recomputed_by, size in activation_sizes(plan, *step[:3], step.dtype).items():
        passes = PASSES_OVER_ACTIVATIONS + (0 if recomputed_by is None else PASSES_OF_RECOMPUTATION)
        traffic = traffic + as_tensor(size, count) * passes / device.memory_bandwidth
    is_sharded = as_tensor(topology.mesh.num_ranks, count) > 1
    overhead = torch.where(is_sharded, device.sharded_block_overhead, device.block_overhead) * is_block
    return (products.seconds + traffic + overhead) * topology.slowdown, products


def part_cost(plan: Plan, parameters: ParameterCost, step: Step, topology: Topology, *, is_block: bool) -> PartCost:
    """Compute the costs of a plan of a block, or of the rest of a model, given those of its parameters."""
    device, batch = topology.device, step[:2]
    dispatched = topology.sent(item for _, item in dispatch_communication(plan, *batch, step.num_chunks))
    others = topology.sent(activation_communication(plan, *batch, step.dtype)) + parameters.others
    compute, products = compute_seconds(plan, step, topology, is_block=is_block)
    # The first chunk arrives, and the last one returns, while no expert computes.
    beside = (1 - 1 / step.num_chunks) * torch.minimum(dispatched.seconds, products.routed_seconds * topology.slowdown)
    hidden_dispatch = device.overlap * beside
    hidden = hidden_dispatch + device.overlap * torch.minimum(parameters.gathered.seconds, compute - beside)
    sent = parameters.gathered + dispatched + others
    return PartCost(
        stored=parameters.stored,
        compute=compute,
        flops=products.flops,
        hidden=hidden,
        exposed=sent.seconds - hidden,
        reduction=parameters.reduction,
        sent=sent,
        dispatched=dispatched.seconds - hidden_dispatch,
    )


def _fsdp(collectives: list[PlannedCollective], *, is_reduction: bool) -> list[PlannedCollective]:
    """Return the collectives of FSDP2: gathers of weights, or reductions of their gradients."""
    return [
        item
        for item in collectives
        if item.bucket is not None and (item.purpose == "gradients of weights") == is_reduction
    ]
