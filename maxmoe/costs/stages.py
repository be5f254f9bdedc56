"""Costs of the ranks of a pipeline: a stage is measured with one micro-batch, the schedule says how many there are."""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from maxmoe.costs.measured import Flow, Measured
from maxmoe.costs.report import RankEstimate, traffic_of
from maxmoe.costs.step import StepOptions, measure_muon, measure_step, part_kind
from maxmoe.costs.stored import stored_memory
from maxmoe.parallel.plan.plan import Plan
from maxmoe.pipelining.boundary import Boundary
from maxmoe.pipelining.fsdp_gathers import NUM_AHEAD, fsdp_gathers
from maxmoe.pipelining.micro_batches import MicroBatch
from maxmoe.pipelining.pipeline_plan import PipelinePlan
from maxmoe.pipelining.schedules import schedule_kind
from maxmoe.pipelining.stage import first_tensor
from maxmoe.pipelining.stage_modules import stage_module, stage_parts
from maxmoe.sharding.mesh import STAGE_AXIS


class _Stages:
    """Measured stages of a pipeline."""

    def __init__(self, module: nn.Module, plan: Plan, pipeline: PipelinePlan, step: StepOptions) -> None:
        self.module, self.pipeline, self._step = module, pipeline, step
        options = pipeline.options
        self.parts = stage_parts(module, len(pipeline.stages), options.blocks_per_stage)
        self.kind = schedule_kind(options.schedule)
        rows, count = step.tokens[0], options.num_micro_batches
        # The first micro-batches have one sequence more. Empty ones are counted as if they had one.
        self.num_rows = Counter(max(1, rows // count + (index < rows % count)) for index in range(count))
        self._boundary = Boundary(module, plan)
        self._measured: dict[Any, Measured] = {}

    def options(self, stage: int, num_rows: int) -> StepOptions:
        """Return how a stage runs a micro-batch."""
        _, length = self._step.tokens
        hidden = self.hidden_states(num_rows) if stage else None
        loss = self._step.loss if stage == len(self.parts) - 1 else _sum_of_hidden_states
        tokens, splits = (num_rows, length), self.kind.splits_backward
        return replace(self._step, tokens=tokens, loss=loss, hidden_states=hidden, splits_backward=splits)

    def hidden_states(self, num_rows: int) -> torch.Tensor:
        """Return a tensor without values like the hidden states of a micro-batch that stages send."""
        inputs = torch.empty(num_rows, self._step.tokens[1], dtype=torch.int64)
        return self._boundary.local_part(self._boundary.hidden_states(MicroBatch(inputs, None, {})))

    def measured(self, stage: int, num_rows: int) -> Measured:
        """Measure a stage, once for all stages that have the same parts."""
        key = part_kind(self.module, self.parts[stage]), num_rows
        if key not in self._measured:
            self._measured[key] = measure_step(self.module, self.parts[stage], self.options(stage, num_rows))
        return self._measured[key]

    def whole_step(self, rank: int) -> Measured:
        """Add up the micro-batches of the stages of a rank, and the messages that it sends to other ranks.

        FSDP2 reduces gradients once, and gathers parameters as often as the schedule lets it. All other parameters are
        gathered for every micro-batch, and their gradients are reduced after every backward.
        """
        total, last = Measured(), len(self.parts) - 1
        gathers = fsdp_gathers(self.pipeline.order[rank], self.kind)
        for stage in self.pipeline.stages_of(rank):
            for number, (num_rows, count) in enumerate(self.num_rows.items()):
                measured = self.measured(stage.index, num_rows)
                total.add(measured, count)
                for flow, times in measured.flows.items():
                    if flow.is_of_fsdp:
                        wanted = gathers[stage.index][flow.purpose] if flow.kind == "all-gather" else 1
                        total.flows[flow] += times * ((0 if number else wanted) - count)
            for other, what in ((stage.index + 1, "hidden states"), (stage.index - 1, "gradients")):
                if 0 <= other <= last and self.pipeline.stages[other].rank != rank:
                    largest = self.hidden_states(max(self.num_rows)).nbytes
                    total.flows[Flow(f"{what} to stages", "send", STAGE_AXIS, largest)] += self.num_rows.total()
        return total

    def memory(self, rank: int) -> dict[str, int]:
        """Return the bytes of activations, and of what is temporary, when most are in memory.

        torch gathers the parameters of up to three stages of a rank before it frees them, and keeps the gradients of
        whole parameters until the last backward of a stage. Each measured stage has its own parameters and gradients.
        """
        pipeline, largest, kept, temporary, unsharded = self.pipeline, max(self.num_rows), {}, {}, {}
        message = self.hidden_states(largest).nbytes
        for stage in pipeline.stages_of(rank):
            measured = self.measured(stage.index, largest)
            # The engine holds the output of a stage until its backward. On the same rank, it is the next one's input.
            has_output = stage.index < len(self.parts) - 1
            is_local = stage.index > 0 and pipeline.stages[stage.index - 1].rank == rank
            kept[stage.index] = measured.saved + message * (has_output - is_local)
            temporary[stage.index] = measured.temporary
            parameters = stage.plan.parameters.values()
            unsharded[stage.index] = sum(
                each.bytes(each.unsharded) for each in parameters if each.fsdp_block is not None
            )
        most = max(temporary, key=temporary.__getitem__)
        gathered = sum(sorted(unsharded.values())[-NUM_AHEAD:]) + pipeline.gradient_peak(rank, unsharded)
        others = gathered - 2 * unsharded[most]
        return {"activations": pipeline.peak(rank, kept), "temporary": temporary[most] + max(0, others)}


def _sum_of_hidden_states(output: Any) -> torch.Tensor:
    return first_tensor(output).sum()


def ranks_of_stages(
    module: nn.Module, plan: Plan, pipeline: PipelinePlan, step: StepOptions, state: dict[str, Any]
) -> tuple[RankEstimate, ...]:
    """Return the costs of each rank along the axis `stage`; `state` has the options of `stored_memory`."""
    stages, ranks = _Stages(module, plan, pipeline, step), []
    for rank in range(pipeline.num_ranks):
        stored, measured = Counter[str](), stages.whole_step(rank)
        for stage in pipeline.stages_of(rank):
            stored.update(stored_memory(stage.plan, **state))
            if state["optimizer"] == "muon":
                of_stage = stage_module(module, stages.parts[stage.index])
                measured.add(measure_muon(of_stage, stages.options(stage.index, 1)))
        indices = tuple(stage.index for stage in pipeline.stages_of(rank))
        memory = dict(stored) | stages.memory(rank)
        ranks.append(RankEstimate(indices, memory, traffic_of(measured), measured.work))
    return tuple(ranks)
