"""Memory per rank and bytes communicated per training step, without running a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.optim import Choice
from maxmoe.optim.muon_communication import muon_communication
from maxmoe.optim.newton_schulz import fast_dtype
from maxmoe.optim.parameter_groups import choose
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.pipelining.pipeline_plan import PipelinePlan
from maxmoe.planning.communication import (
    Traffic,
    activation_communication,
    dispatch_communication,
    parameter_communication,
    traffic_of,
)
from maxmoe.planning.memory import (
    PARAMETER_DTYPES,
    StateDtypes,
    activation_memory,
    gathered_memory,
    parameter_dtype,
    stored_memory,
)
from maxmoe.planning.pipeline_estimate import (
    PipelineEstimate,
    RankEstimate,
    Tokens,
    message_bytes,
    messages,
    rank_communication,
    rank_memory,
    rank_parameters,
)
from maxmoe.planning.plan_model import pipeline_options, plan_model
from maxmoe.planning.saved_tensors import local_trace
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.planned_collective import PlannedCollective
from maxmoe.sharding.rules import LogicalRules
from maxmoe.text_table import paragraph, readable_bytes, terminal_width, text_table

Optimizer = Literal["adamw", "muon"]


@dataclass(frozen=True)
class Estimate:
    """Result of `estimate`. As a string, two tables as wide as the terminal.

    Args:
        memory: bytes per rank at the beginning of the backward, by purpose. "activations" are saved from the forward
            to the backward; "recomputed activations" are those of the module with the most.
        traffic: collectives per step, without the all-reduces of losses, statistics and the gradient norm.
        pipeline: costs of all ranks along the axis `stage`; None if the model is not cut into stages. Otherwise, memory
            and traffic are those of the rank that needs the most memory.
        uncounted: what is not counted, because the forward of the module cannot be traced; None if all is.
    """

    memory: dict[str, int]
    traffic: tuple[Traffic, ...]
    pipeline: PipelineEstimate | None = None
    uncounted: str | None = None

    def __str__(self) -> str:
        lines = [(name, readable_bytes(count)) for name, count in self.memory.items()]
        rank = "per rank" if self.pipeline is None else f"of rank {self.pipeline.largest} along stage"
        memory = [(f"memory {rank}", "bytes"), *lines, ("total", readable_bytes(sum(self.memory.values())))]
        heading = "collectives per step" if self.pipeline is None else f"messages and collectives {rank}, per step"
        traffic = [(heading, "kind", "axis", "times", "bytes sent per rank")]
        traffic += [row.cells for row in self.traffic]
        total = readable_bytes(sum(row.bytes for row in self.traffic))
        traffic.append(("total", "", "", str(sum(row.times for row in self.traffic)), total))
        width = terminal_width()
        tables = [text_table(memory, right=[1], width=width), text_table(traffic, right=[3, 4], width=width)]
        first = [] if self.uncounted is None else [paragraph(self.uncounted, width=width)]
        return "\n\n".join([*first, *([] if self.pipeline is None else [str(self.pipeline)]), *tables])


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
    state_dtypes: StateDtypes = PARAMETER_DTYPES,
) -> Estimate:
    """Estimate the memory per rank and the communication per training step of a module on a mesh.

    Gradients and optimizer state have the dtype of the parameters, as in `torch.optim`, or the dtypes of
    `state_dtypes`.
    AdamW keeps two elements per parameter element and does not communicate. Muon keeps one for the parameters that
    `maxmoe.optim.parameter_groups` assigns to it, and communicates sharded matrices in its default dtype on the device
    of the parameters.

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
            experts are moved; one expert has all rows above an even load. The collectives are then those of the rank
            that sends most. Memory is counted for balanced routing.
        allow_unused: accept rules and mesh axes without effect.
        schedule: schedule of the pipeline stages, as for `maxmoe.pipeline`.
        num_micro_batches: number of micro-batches of a step; None to estimate the whole model, without pipeline stages,
            also on a mesh with an axis `stage`.
        blocks_per_stage: number of blocks of each stage, as for `maxmoe.pipeline`.
        stages_per_rank: number of stages of each rank, as for `maxmoe.pipeline`.
        state_dtypes: dtypes of gradients, master weights and moments.

    Raises:
        ValueError: as `parameter_shardings` and `maxmoe.pipeline`; for parameters of several dtypes; if axes that
            shard the tokens do not divide them.
    """
    module, rules = planned_copy(module), LogicalRules.load(rules)
    choices = choose(module, {}) if optimizer == "muon" else ()
    plan, pipeline = plan_model(
        module,
        mesh,
        rules,
        pipeline_options(schedule, num_micro_batches, blocks_per_stage, stages_per_rank),
        dispatch=dispatch,
        num_chunks=num_chunks,
        imbalance=imbalance,
        allow_unused=allow_unused,
    )
    dtype = parameter_dtype(plan)
    ns_dtype = fast_dtype(next(module.parameters()).device)
    if pipeline is not None:
        tokens = Tokens(batch_size, sequence_length)
        message = message_bytes(module, plan, tokens, pipeline.options.num_micro_batches)
        return _pipeline_estimate(pipeline, tokens, message, num_chunks, optimizer, choices, ns_dtype, state_dtypes)
    kept, recomputed = activation_memory(plan, batch_size, sequence_length, num_chunks)
    memory = {
        **stored_memory(plan, optimizer, _matrices(choices), state_dtypes),
        "gathered parameters": gathered_memory(plan),
        "activations": kept,
        "recomputed activations": recomputed,
    }
    communication: list[PlannedCollective] = []
    communication += parameter_communication(plan, num_chunks)
    communication += activation_communication(plan, batch_size, sequence_length, dtype)
    communication += (item for _, item in dispatch_communication(plan, batch_size, sequence_length, num_chunks))
    communication += muon_communication(plan, choices, ns_dtype)
    uncounted = local_trace(plan, batch_size, sequence_length).problem
    return Estimate(memory, traffic_of(communication), uncounted=uncounted)


def _pipeline_estimate(
    pipeline: PipelinePlan,
    tokens: Tokens,
    message: int,
    num_chunks: int,
    optimizer: Optimizer,
    choices: Sequence[Choice],
    ns_dtype: torch.dtype,
    state_dtypes: StateDtypes,
) -> Estimate:
    """Estimate the costs of every rank along the axis `stage`, with the communication of the one with most memory."""
    matrices, ranks = _matrices(choices), []
    for rank in range(pipeline.num_ranks):
        most = pipeline.max_in_flight(rank)
        memory = rank_memory(pipeline, rank, tokens, message, num_chunks, optimizer, matrices, state_dtypes)
        sent = sum(item.bytes for item in messages(pipeline, rank, message))
        ranks.append(
            RankEstimate(
                tuple(most), tuple(most.values()), memory, sent, pipeline.work(rank), pipeline.timeline.idle(rank)
            )
        )
    costs = PipelineEstimate(pipeline, tuple(ranks))
    parameters = rank_parameters(pipeline, costs.largest)
    mine = [choice for choice in choices if choice.name in parameters.parameters]
    communication = [
        *rank_communication(pipeline, costs.largest, tokens, message, num_chunks),
        *muon_communication(parameters, mine, ns_dtype),
    ]
    uncounted = (local_trace(stage.plan, *tokens).problem for stage in pipeline.stages)
    return Estimate(ranks[costs.largest].memory, traffic_of(communication), costs, next(filter(None, uncounted), None))


def _matrices(choices: Sequence[Choice]) -> set[str]:
    """Return the names of the parameters that Muon orthogonalizes."""
    return {choice.name for choice in choices if choice.matrix is not None}
