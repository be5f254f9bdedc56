"""Plans many meshes at once, and computes the costs of a step in each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from maxmoe.declaration import declaration_of
from maxmoe.parallel.dispatch_plan import Dispatch
from maxmoe.parallel.plan import Plan
from maxmoe.planning.many_meshes import MeshesDiffer, Sizes, as_tensor
from maxmoe.planning.memory import gathered_memory
from maxmoe.planning.plan_search.candidates import Candidates
from maxmoe.planning.plan_search.model_parts import ModelParts
from maxmoe.planning.plan_search.part_cost import (
    ParameterCost,
    PartCost,
    Step,
    parameter_cost,
    part_cost,
    part_plan,
    rest_plan,
)
from maxmoe.planning.plan_search.step_cost import StepCost, pipelined_step, stage_of, whole_step
from maxmoe.planning.saved_tensors import local_tokens
from maxmoe.planning.time_model.collective_time import Topology
from maxmoe.planning.time_model.device import Device
from maxmoe.planning.whole_plan import plan_without_warnings
from maxmoe.sharding.mesh import STAGE_AXIS
from maxmoe.sharding.planned_collective import PlannedCollective
from maxmoe.sharding.rules import LogicalRules

Result = TypeVar("Result")


def for_all(
    evaluate: Callable[[Candidates], Result], meshes: Candidates
) -> Iterator[tuple[Candidates, Result | ValueError]]:
    """Evaluate many meshes at once, and in groups where the planner decides differently; yield each group's result.

    The result is the error if no mesh of a group can be planned.
    """
    pending = [meshes] if len(meshes) else []
    while pending:
        group = pending.pop()
        try:
            yield group, evaluate(group)
        except MeshesDiffer as differ:
            pending += [group.select(differ.mask), group.select(~differ.mask)]
        except ValueError as error:
            yield group, error


@dataclass(frozen=True)
class Evaluation:
    """Costs of a model on a device.

    Args:
        parts: parts of the model.
        device: device and network.
        step: the step, with the batch of all micro-batches.
    """

    parts: ModelParts
    device: Device
    step: Step

    def plan(self, meshes: Candidates, rules: LogicalRules, dispatch: Dispatch) -> "Planned":
        """Plan meshes that have the same axes."""
        within = meshes.mesh.within_stage() if meshes.has_stages else meshes.mesh
        modules = (self.parts.first, self.parts.last) if meshes.has_stages else (self.parts.whole,)
        plans = [plan_without_warnings(module, within, rules, dispatch, 1, True) for module in modules]
        return Planned(self, meshes, tuple(plans))


@dataclass(frozen=True)
class Planned:
    """Plans of a model on many meshes.

    Args:
        evaluation: model, device and step.
        meshes: the meshes.
        plans: plan of the model with one block of each kind; with stages, that of the first and that of the last part.
    """

    evaluation: Evaluation
    meshes: Candidates
    plans: tuple[Plan, ...]
    _parameters: dict[int, tuple[dict[str, ParameterCost], list[ParameterCost]]] = field(default_factory=dict)

    @cached_property
    def topology(self) -> Topology:
        """The meshes with the device."""
        return Topology(self.meshes.mesh, self.evaluation.device, len(self.meshes))

    @cached_property
    def parts(self) -> tuple[dict[str, Plan], list[Plan]]:
        """Plan of each kind of block, and of the rest of each of the plans."""
        kinds = self.evaluation.parts.kinds
        blocks = {kind: part_plan(self.plans[0], kind) for kind in kinds}
        return blocks, [rest_plan(plan, kinds) for plan in self.plans]

    def parameters(self, num_chunks: int) -> tuple[dict[str, ParameterCost], list[ParameterCost]]:
        """Compute the costs of the parameters of each kind of block, and of the rest of each of the plans."""
        if num_chunks not in self._parameters:
            blocks, rest = self.parts
            options = num_chunks, self.evaluation.step.state_dtypes, self.topology
            costs = {kind: parameter_cost(plan, *options) for kind, plan in blocks.items()}
            self._parameters[num_chunks] = costs, [parameter_cost(plan, *options) for plan in rest]
        return self._parameters[num_chunks]

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Return lower bounds of the memory and of the exposed collectives of the slowest rank, both ``(N,)``."""
        blocks, rest = self.parameters(1)
        counts = self.evaluation.parts.counts
        parts = [(blocks[kind], count) for kind, count in counts.items()] + [(part, 1) for part in rest]
        stored = torch.stack([part.stored * count for part, count in parts]).sum(0)
        exposed = torch.stack([part.others.seconds * count for part, count in parts]).sum(0)
        stages = self.meshes.product([STAGE_AXIS])
        return stored / stages, exposed / stages * self.meshes.num_micro_batches

    def micro_batch(self) -> int:
        """Return the number of sequences of the largest micro-batch over all ranks."""
        batch_size, length = self.evaluation.step[:2]
        if not self.meshes.has_stages:
            return batch_size
        rows, _ = local_tokens(self.plans[0], batch_size, length)
        many = Sizes(self.meshes.num_micro_batches)
        largest = rows // many + (rows % many > 0)
        return largest * (batch_size // rows)

    def cost(self, num_chunks: int) -> StepCost:
        """Compute the costs of a step with the recomputation that the model has."""
        parts = self.evaluation.parts
        batch = self.micro_batch()
        step = self.evaluation.step._replace(batch_size=batch, num_chunks=num_chunks)
        (block_plans, rest_plans), (of_blocks, of_rest) = self.parts, self.parameters(num_chunks)
        blocks = {
            kind: part_cost(plan, of_blocks[kind], step, self.topology, is_block=True)
            for kind, plan in block_plans.items()
        }
        rest = [
            part_cost(plan, cost, step, self.topology, is_block=False)
            for plan, cost in zip(rest_plans, of_rest, strict=True)
        ]
        if self.meshes.has_stages:
            return self._pipelined(blocks, rest, step)
        gathered = as_tensor(gathered_memory(self.plans[0]), len(self.meshes))
        return whole_step(stage_of(blocks, parts.counts, rest), gathered, self.topology)

    def _pipelined(self, blocks: dict[str, PartCost], rest: list[PartCost], step: Step) -> StepCost:
        """Compute the costs, for all meshes with the same number of stages together."""
        stages, result = self.meshes.sizes[STAGE_AXIS], []
        message = self._message(step)
        for number in stages.unique().tolist():
            mask = stages == number
            group = [each.select(mask) for each in (*rest, *blocks.values())]
            first, last, *chosen = group
            kinds = dict(zip(blocks, chosen, strict=True))
            counts = self.evaluation.parts.counts_by_stage(number)
            around = [[first], *([] for _ in range(number - 2)), [last]]
            costs = [stage_of(kinds, count, others) for count, others in zip(counts, around, strict=True)]
            meshes = self.meshes.select(mask)
            topology = Topology(meshes.mesh, self.evaluation.device, len(meshes))
            sent = message[mask]
            one = PlannedCollective("hidden states to stages", "send", (STAGE_AXIS,), Sizes(sent.long()))
            messages = topology.sent([one, one])
            step_cost = pipelined_step(costs, meshes.num_micro_batches, messages, sent, topology)
            result.append((mask, step_cost))
        return StepCost.joined(result, len(self.meshes))

    def _message(self, step: Step) -> Tensor:
        """Return the bytes of the hidden states of a micro-batch on a rank."""
        stream = declaration_of(self.evaluation.parts.model).residual_stream
        assert stream is not None, "Search.stages asks for it"
        plan = self.plans[0]
        rows, length = local_tokens(plan, step.batch_size, step.sequence_length)
        elements = rows * length * stream.hidden_size // plan.mesh.size(*plan.embed_axes)
        return as_tensor(elements * step.dtype.itemsize, len(self.meshes))
