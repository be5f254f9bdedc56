"""Memory per rank and bytes communicated per training step, measured on one fake rank."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.checks.fields import check_int, check_number
from maxmoe.costs.report import Estimate, RankEstimate, traffic_of
from maxmoe.costs.stages import ranks_of_stages
from maxmoe.costs.step import Inputs, Loss, StepOptions, measure_muon, measure_step
from maxmoe.costs.stored import MIXED_PRECISION, StateDtypes, stored_memory
from maxmoe.declaration import declaration_of
from maxmoe.optim.parameter_groups import choose
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.plan import Plan
from maxmoe.pipelining.pipeline_plan import pipeline_options, plan_model
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.rules import LogicalRules

Optimizer = Literal["adamw", "muon"]


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
    inputs: Inputs | None = None,
    loss: Loss | None = None,
) -> Estimate:
    """Estimate the memory per rank and the communication per training step of a module on a mesh.

    The module runs a forward and a backward as the first rank of the mesh, in this process: its floating-point tensors
    have shapes and no values, its collectives communicate nothing. What is counted is therefore what a step does, for
    any module, on the CPU. Of blocks that repeat, declared by `pipeline_parts` of `Declaration`, up to three of each
    kind run. The results of an operator are counted, its work space is not.

    Gradients have the dtype of the parameters, master weights of narrower parameters and moments are float32, unless
    `state_dtypes` has other dtypes. All are in memory during the whole step. AdamW keeps two elements per parameter
    element. Muon keeps one for the parameters that `maxmoe.optim.parameter_groups` assigns to it, and its step is
    measured too. Every expert gets equally many tokens from every rank.

    On a mesh with an axis `stage`, every stage is measured with one micro-batch; the schedule says how many are in
    memory. Receive buffers, and the gradients that a split backward keeps between its halves, are not counted.

    Args:
        module: module before `maxmoe.parallelize`, on any device, including meta; it is not changed.
        mesh: mesh of real or planned ranks.
        rules: table of rules, or the name of a preset.
        batch_size: number of sequences per step, over all ranks.
        sequence_length: number of tokens per sequence.
        optimizer: optimizer whose state and collectives are counted.
        dispatch: strategy for experts on other ranks, as for `maxmoe.parallelize`.
        num_chunks: number of chunks of the tokens of a MoE layer.
        imbalance: number of rows of the rank with the most rows over the mean; the first expert has all rows above an
            even load.
        allow_unused: accept rules and mesh axes without effect.
        schedule: schedule of the pipeline stages, as for `maxmoe.pipeline`.
        num_micro_batches: number of micro-batches of a step; None to estimate the whole model, without pipeline stages,
            also on a mesh with an axis `stage`.
        blocks_per_stage: number of blocks of each stage, as for `maxmoe.pipeline`.
        stages_per_rank: number of stages of each rank, as for `maxmoe.pipeline`.
        state_dtypes: dtypes of gradients, master weights and moments.
        inputs: function of the numbers of sequences of a rank and of tokens of each, which returns the arguments of
            the module as a tuple, or its keyword arguments as a dict. None for token ids ``(B, S)``, or hidden states
            ``(B, S, D)`` of a module that does not begin with an embedding.
        loss: function of the output of the module that returns a scalar. None for the mean cross-entropy of the
            attribute `logits` of the output, in float32, plus its `aux_loss`, or the sum of an output without logits.

    Returns:
        Memory, communication and operators of each rank along the axis `stage`.

    Raises:
        ValueError: as `parameter_shardings` and `maxmoe.pipeline`; for another optimizer; for an empty batch; for
            longer sequences than the module declares (`max_sequence_length`); if axes that shard the tokens do not
            divide them; if the step needs values, with the module and the operator that do.
    """
    if optimizer not in get_args(Optimizer):
        raise ValueError(f"optimizer must be one of {', '.join(get_args(Optimizer))}, got {optimizer!r}")
    module, rules = planned_copy(module), LogicalRules.load(rules)
    choices = choose(module, {}) if optimizer == "muon" else ()
    options = pipeline_options(schedule, num_micro_batches, blocks_per_stage, stages_per_rank)
    plan, stages = plan_model(
        module, mesh, rules, options, dispatch=dispatch, num_chunks=num_chunks, allow_unused=allow_unused
    )
    check_sequence_length(module, sequence_length)
    step = StepOptions(
        sizes=plan.mesh.within_stage().sizes,
        rules=rules,
        dispatch=dispatch,
        num_chunks=num_chunks,
        tokens=local_tokens(plan, batch_size, sequence_length),
        inputs=inputs,
        loss=loss,
        hot_share=_hot_share(plan, imbalance),
    )
    matrices = {each.name for each in choices if each.matrix is not None}
    state = {"optimizer": optimizer, "matrices": matrices, "dtypes": state_dtypes}
    if stages is None:
        return Estimate((_whole_model(module, plan, step, state),))
    return Estimate(ranks_of_stages(module, plan, stages, step, state))


def check_sequence_length(model: nn.Module, length: int) -> None:
    """Raise a ValueError if the forward of a module of a model does not take sequences of this length."""
    check_int("sequence_length", length, at_least=1)
    for module in model.modules():
        longest = declaration_of(module).max_sequence_length
        if longest is not None and length > longest:
            raise ValueError(
                f"sequence_length ({length}) must not exceed max_sequence_length ({longest}) of {type(module).__name__}"
            )


def local_tokens(plan: Plan, batch_size: int, sequence_length: int) -> tuple[int, int]:
    """Return the number of sequences of a rank and of tokens of each; raise if axes do not divide the global batch."""
    tokens, mesh, local = plan.tokens, plan.mesh, []
    sizes = (("batch_size", batch_size, tokens.batch_axes), ("sequence_length", sequence_length, tokens.length_axes))
    for name, length, axes in sizes:
        check_int(name, length, at_least=1)
        if length % mesh.size(*axes):
            product = " * ".join(f"{axis}={mesh.size(axis)}" for axis in axes)
            raise ValueError(f"{name} ({length}) must be divisible by {product}, over which it is sharded")
        local.append(length // mesh.size(*axes))
    return local[0], local[1]


def _hot_share(plan: Plan, imbalance: float) -> float:
    """Return the share of the slots of the first expert if the rank that has it gets `imbalance` times the mean."""
    check_number("imbalance", imbalance, at_least=1.0)
    if imbalance == 1.0:
        return 0.0
    num_ranks = max((dispatch.mesh.size(*dispatch.group_axes) for _, dispatch in plan.layers.values()), default=1)
    if imbalance > num_ranks or num_ranks == 1:
        raise ValueError(
            f"imbalance must be at most the number of ranks that share the experts ({num_ranks}), got {imbalance}"
        )
    return (imbalance - 1) / (num_ranks - 1)


def _whole_model(module: nn.Module, plan: Plan, step: StepOptions, state: dict[str, Any]) -> RankEstimate:
    """Return the costs of a rank without stages."""
    measured = measure_step(module, None, step)
    memory = stored_memory(plan, **state) | {"activations": measured.saved, "temporary": measured.temporary}
    if state["optimizer"] == "muon":
        measured.add(measure_muon(module, step))
    return RankEstimate((), memory, traffic_of(measured), measured.work)
