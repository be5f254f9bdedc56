"""Plans many meshes at once, and computes the costs of a step in each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from maxmoe.declaration import declaration_of
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.plan import Plan
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.planning.communication import activation_communication, dispatch_communication
from maxmoe.planning.many_meshes import MeshesDiffer, as_tensor, in_meshes
from maxmoe.planning.memory import gathered_memory
from maxmoe.planning.plan_search.candidates import Candidates
from maxmoe.planning.plan_search.model_parts import ModelParts, StageKind
from maxmoe.planning.plan_search.part_cost import (
    ParameterCost,
    Step,
    compute_seconds,
    parameter_cost,
    part_cost,
    part_memory,
    part_plan,
    rest_plan,
)
from maxmoe.planning.plan_search.settings import CHUNKS
from maxmoe.planning.plan_search.step_cost import Stages, StepCost, pipelined_step, stage_of, whole_step
from maxmoe.planning.plan_search.step_memory import memory_of, pipelined_memory
from maxmoe.planning.saved_tensors import local_tokens
from maxmoe.planning.time_model.collective_time import Topology
from maxmoe.planning.time_model.device import Device
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
        step: the optimizer step.
    """

    parts: ModelParts
    device: Device
    step: Step

    def plan(self, meshes: Candidates, rules: LogicalRules, dispatch: Dispatch) -> "PlannedMeshes":
        """Plan meshes that have the same axes."""
        within = meshes.mesh.within_stage() if meshes.has_stages else meshes.mesh
        is_cut = meshes.has_stages and not meshes.may_be_one
        modules = (self.parts.first, self.parts.last) if is_cut else (self.parts.whole,)
        plans = [make_plan(module, within, rules, dispatch=dispatch, allow_unused=True) for module in modules]
        return PlannedMeshes(self, meshes, tuple(plans))


@dataclass(frozen=True)
class PlannedMeshes:
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
        """Return lower bounds of the memory and of the time of the slowest rank, both ``(N,)``.

        The time is that with the best number of micro-batches. The model must recompute nothing.
        """
        blocks, rest = self.parameters(1)
        counts = self.evaluation.parts.counts
        parts = [(blocks[kind], count) for kind, count in counts.items()] + [(part, 1) for part in rest]
        batch_size, length, *_ = self.evaluation.step

        def mean(values: list[Tensor]) -> Tensor:
            """Return the mean over the stages, which the slowest and the largest rank are not below."""
            return torch.stack(values).sum(0) / self.meshes.product([STAGE_AXIS])

        dispatched, activations, products = [], [], []
        for kind, plan in self.parts[0].items():
            own = compute_seconds(plan, self.evaluation.step, self.topology, is_block=True)[0]
            products.append(own * counts[kind])
            items = [item for _, item in dispatch_communication(plan, batch_size, length)]
            dispatched.append(self.topology.sent(items).seconds * counts[kind])
            items = list(activation_communication(plan, batch_size, length, self.evaluation.step.dtype))
            activations.append(self.topology.sent(items).seconds * counts[kind])
        nothing = [torch.zeros(len(self.meshes), dtype=torch.float64)]
        others = mean([part.others.seconds * count for part, count in parts])
        gathered = mean([part.gathered.seconds * count for part, count in parts])
        computing = mean(nothing + products)
        # Gathers of FSDP2 overlap with products; of the dispatch, only the share that max(CHUNKS) chunks hide.
        dispatch = mean(nothing + dispatched)
        exposed, hideable = mean(nothing + activations) + dispatch / max(CHUNKS), dispatch * (1 - 1 / max(CHUNKS))
        stages, rows = self.meshes.product([STAGE_AXIS]), local_tokens(self.plans[0], batch_size, length)[0]
        most, many = as_tensor(rows, len(self.meshes)), stages.double()
        seconds = torch.full_like(many, torch.inf)
        while bool((fits := (many <= most) | (many == 1)).any()):
            time = exposed + others * many + torch.maximum(gathered * many + hideable, computing)
            bound = time * (1 + (stages - 1) / many)
            seconds = torch.where(fits, torch.minimum(seconds, bound), seconds)
            many = torch.where(stages > 1, many * 2, torch.inf)
        return mean([part.stored * count for part, count in parts]), seconds

    def micro_batch(self) -> int:
        """Return the number of sequences of the largest micro-batch over all ranks."""
        batch_size, length = self.evaluation.step[:2]
        if not self.meshes.has_stages:
            return batch_size
        rows, _ = local_tokens(self.plans[0], batch_size, length)
        many = in_meshes(self.meshes.num_micro_batches)
        largest = rows // many + (rows % many > 0)
        return largest * (batch_size // rows)

    def memory(self) -> Tensor:
        """Compute the bytes of the rank that needs most, ``(N,)``, with one chunk and what the model recomputes."""
        step, count = self._micro_step(1), len(self.meshes)
        (block_plans, rest_plans), (of_blocks, of_rest) = self.parts, self.parameters(1)
        blocks = {kind: part_memory(plan, of_blocks[kind], step, count) for kind, plan in block_plans.items()}
        rest = [part_memory(plan, cost, step, count) for plan, cost in zip(rest_plans, of_rest, strict=True)]
        if not self.meshes.has_stages:
            total = memory_of(blocks, self.evaluation.parts.counts, rest)
            gathered = as_tensor(gathered_memory(self.plans[0]), count)
            return total.stored + gathered + total.kept + total.recomputed
        message, result = self._message(step), torch.empty(count, dtype=torch.float64)
        for mask, kinds in self._by_stages():
            chosen = {kind: memory.select(mask) for kind, memory in blocks.items()}
            ends = [memory.select(mask) for memory in rest]
            stages = [(kind, memory_of(chosen, kind.blocks, _ends(kind, ends))) for kind in kinds]
            result[mask] = pipelined_memory(stages, self.meshes.num_micro_batches[mask], message[mask])
        return result

    def cost(self, num_chunks: int) -> StepCost:
        """Compute the time of a step with the recomputation that the model has."""
        step, parts = self._micro_step(num_chunks), self.evaluation.parts
        (block_plans, rest_plans), (of_blocks, of_rest) = self.parts, self.parameters(num_chunks)
        blocks = {
            kind: part_cost(plan, of_blocks[kind], step, self.topology, is_block=True)
            for kind, plan in block_plans.items()
        }
        rest = [
            part_cost(plan, cost, step, self.topology, is_block=False)
            for plan, cost in zip(rest_plans, of_rest, strict=True)
        ]
        if not self.meshes.has_stages:
            return whole_step(stage_of(blocks, parts.counts, rest), self.topology)
        message, result = self._message(step), []
        for mask, kinds in self._by_stages():
            chosen = {kind: cost.select(mask) for kind, cost in blocks.items()}
            ends = [cost.select(mask) for cost in rest]
            stages = [Stages(stage_of(chosen, kind.blocks, _ends(kind, ends)), kind.number) for kind in kinds]
            meshes = self.meshes.select(mask)
            topology = Topology(meshes.mesh, self.evaluation.device, len(meshes))
            one = PlannedCollective("hidden states to stages", "send", (STAGE_AXIS,), in_meshes(message[mask].long()))
            messages = topology.sent([one, one])
            result.append((mask, pipelined_step(stages, meshes.num_micro_batches, messages, topology)))
        return StepCost.joined(result, len(self.meshes))

    def _micro_step(self, num_chunks: int) -> Step:
        return self.evaluation.step._replace(batch_size=self.micro_batch(), num_chunks=num_chunks)

    def _by_stages(self) -> Iterator[tuple[Tensor, list[StageKind]]]:
        """Yield the kinds of stages for each number of stages, with the mask of the meshes that have as many."""
        numbers = self.meshes.sizes[STAGE_AXIS]
        for number in torch.unique(numbers).tolist():
            yield numbers == number, self.evaluation.parts.stages(number)

    def _message(self, step: Step) -> Tensor:
        """Return the bytes of the hidden states of a micro-batch on a rank."""
        stream = declaration_of(self.evaluation.parts.model).residual_stream
        assert stream is not None, "only a model that can_be_cut has stages"
        plan = self.plans[0]
        rows, length = local_tokens(plan, step.batch_size, step.sequence_length)
        elements = rows * length * stream.hidden_size // plan.mesh.size(*plan.embed_axes)
        return as_tensor(elements * step.dtype.itemsize, len(self.meshes))


Part = TypeVar("Part")


def _ends(kind: StageKind, ends: Sequence[Part]) -> list[Part]:
    """Return the first and the last part of the model that a stage has."""
    first, last = ends
    return [first] * kind.is_first + [last] * kind.is_last
