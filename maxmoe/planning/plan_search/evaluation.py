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
from maxmoe.planning.communication import activation_communication, dispatch_communication
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
from maxmoe.planning.plan_search.settings import CHUNKS
from maxmoe.planning.plan_search.step_cost import Stages, StepCost, pipelined_step, stage_of, whole_step
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

    @cached_property
    def seconds_of_products(self) -> float:
        """Time of all products on one rank at the share of the peak that products of many rows reach."""
        whole = self.plan(Candidates({}, torch.ones(1, dtype=torch.int64)), LogicalRules(), "auto")
        return float(whole.cost(1).flops[0]) / (self.device.peak(self.step.dtype) * self.device.max_share)

    def plan(self, meshes: Candidates, rules: LogicalRules, dispatch: Dispatch) -> "Planned":
        """Plan meshes that have the same axes."""
        within = meshes.mesh.within_stage() if meshes.has_stages else meshes.mesh
        is_cut = meshes.has_stages and not meshes.may_be_one
        modules = (self.parts.first, self.parts.last) if is_cut else (self.parts.whole,)
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

        dispatched, activations = [], []
        for kind, plan in self.parts[0].items():
            items = [item for _, item in dispatch_communication(plan, batch_size, length)]
            dispatched.append(self.topology.sent(items).seconds * counts[kind])
            items = list(activation_communication(plan, batch_size, length, self.evaluation.step.dtype))
            activations.append(self.topology.sent(items).seconds * counts[kind])
        nothing = [torch.zeros(len(self.meshes), dtype=torch.float64)]
        others = mean([part.others.seconds * count for part, count in parts])
        gathered = mean([part.gathered.seconds * count for part, count in parts])
        ranks = as_tensor(self.topology.mesh.num_ranks, len(self.meshes))
        products = self.evaluation.seconds_of_products / ranks * self.topology.slowdown
        # Communication is hidden behind products at most; of the dispatch, what more chunks hide.
        dispatch = mean(nothing + dispatched)
        exposed, hideable = mean(nothing + activations) + dispatch / max(CHUNKS), dispatch * (1 - 1 / max(CHUNKS))
        stages, rows = self.meshes.product([STAGE_AXIS]), local_tokens(self.plans[0], batch_size, length)[0]
        most, many = as_tensor(rows, len(self.meshes)), stages.double()
        seconds = torch.full_like(many, torch.inf)
        while bool((fits := (many <= most) | (many == 1)).any()):
            time = exposed + others * many + torch.maximum(gathered * many + hideable, products)
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
            costs = [
                Stages(
                    stage_of(kinds, stage.blocks, [first] * stage.is_first + [last] * stage.is_last),
                    stage.rank,
                    stage.count,
                    stage.is_last,
                )
                for stage in self.evaluation.parts.stages(number)
            ]
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
