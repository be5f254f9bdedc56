"""Time and memory of a whole step, from the costs of its parts."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from maxmoe.planning.plan_search.part_cost import PartCost
from maxmoe.planning.time_model.collective_time import CollectiveCost, Topology


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Costs of a step on the rank that takes most time; each tensor is ``(N,)``.

    Args:
        compute: seconds of products, memory traffic and the optimizer.
        hidden: seconds of collectives that run beside products.
        exposed: seconds of all other collectives.
        bubble: seconds in which the rank waits for other stages.
        flops: floating-point operations.
        intra_bytes: bytes sent to ranks of the same node.
        inter_bytes: bytes sent to other nodes.
        dispatched: seconds of `exposed` that more chunks could hide.
    """

    compute: Tensor
    hidden: Tensor
    exposed: Tensor
    bubble: Tensor
    flops: Tensor
    intra_bytes: Tensor
    inter_bytes: Tensor
    dispatched: Tensor

    @property
    def seconds(self) -> Tensor:
        """Time of a step."""
        return self.compute + self.exposed + self.bubble

    @staticmethod
    def joined(parts: "Sequence[tuple[Tensor, StepCost]]", count: int) -> "StepCost":
        """Join the costs of groups of `count` meshes, each with the mask of its meshes."""
        values = {field.name: torch.empty(count, dtype=torch.float64) for field in fields(StepCost)}
        for mask, cost in parts:
            for name, value in values.items():
                value[mask] = getattr(cost, name)
        return StepCost(**values)


def stage_of(blocks: Mapping[str, PartCost], counts: Mapping[str, int], rest: Sequence[PartCost]) -> PartCost:
    """Add up the costs of the blocks of a stage, or of the whole model, and of the parts before and after them."""
    parts = [(blocks[kind], count) for kind, count in counts.items()] + [(part, 1) for part in rest]

    def total(name: str) -> Tensor:
        return torch.stack([getattr(part, name) * count for part, count in parts]).sum(0)

    def sent(name: str) -> CollectiveCost:
        costs: list[CollectiveCost] = [getattr(part, name) * float(count) for part, count in parts]
        return functools.reduce(CollectiveCost.__add__, costs)

    names = ("stored", "compute", "hidden", "exposed", "flops", "dispatched")
    return PartCost(
        **{name: total(name) for name in names},
        reduction=sent("reduction"),
        sent=sent("sent"),
    )


def whole_step(stage: PartCost, topology: Topology) -> StepCost:
    """Return the costs of a step without pipeline stages.

    Args:
        stage: costs of the whole model; its micro-batch is the batch.
        topology: ranks, device and network.
    """
    overlap = topology.device.overlap
    beside = overlap * torch.minimum(stage.reduction.seconds, (stage.compute - stage.hidden).clamp(min=0))
    sent = stage.sent + stage.reduction
    return StepCost(
        compute=stage.compute + _update(stage, topology),
        hidden=stage.hidden + beside,
        exposed=stage.exposed + stage.reduction.seconds - beside,
        bubble=torch.zeros_like(stage.compute),
        flops=stage.flops,
        intra_bytes=sent.intra_bytes,
        inter_bytes=sent.inter_bytes,
        dispatched=stage.dispatched,
    )


class Stages(NamedTuple):
    """Stages of a pipeline with the same costs.

    Attributes:
        cost: costs of one of them.
        number: number of them.
    """

    cost: PartCost
    number: int


def pipelined_step(
    stages: Sequence[Stages], num_micro_batches: Tensor, messages: CollectiveCost, topology: Topology
) -> StepCost:
    """Return the costs of a step of the schedule 1F1B with one stage per rank.

        seconds = sum of the stages' times of a micro-batch + (M - 1) * the longest of them
                  + reductions and update of the slowest stage

    Args:
        stages: stages, those with the same costs once.
        num_micro_batches: M, number of micro-batches of each mesh.
        messages: cost of the hidden states that a stage sends for a micro-batch, and of their gradients.
        topology: ranks, device and network.
    """
    many = num_micro_batches
    costs = [stage.cost for stage in stages]
    times = torch.stack([cost.seconds + messages.seconds for cost in costs])
    slowest = times.argmax(0)

    def of_slowest(values: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(values)).gather(0, slowest[None])[0]

    fill = sum(time * stage.number for time, stage in zip(times, stages, strict=True))
    sent = [(cost.sent + messages) * many + cost.reduction for cost in costs]
    update = of_slowest([_update(cost, topology) for cost in costs])
    reductions = of_slowest([cost.reduction.seconds for cost in costs])
    return StepCost(
        compute=of_slowest([cost.compute for cost in costs]) * many + update,
        hidden=of_slowest([cost.hidden for cost in costs]) * many,
        exposed=(of_slowest([cost.exposed for cost in costs]) + messages.seconds) * many + reductions,
        bubble=fill - times.amax(0),
        flops=of_slowest([cost.flops for cost in costs]) * many,
        intra_bytes=of_slowest([each.intra_bytes for each in sent]),
        inter_bytes=of_slowest([each.inter_bytes for each in sent]),
        dispatched=of_slowest([cost.dispatched for cost in costs]) * many,
    )


def _update(stage: PartCost, topology: Topology) -> Tensor:
    """Return the seconds in which the optimizer reads and writes what the rank stores."""
    return 2 * stage.stored / topology.device.memory_bandwidth * topology.slowdown
