"""Search for the fastest plans of a model on a number of ranks."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.checks.fields import check_int
from maxmoe.nn import recompute_of, set_recompute
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.planning.estimate import estimate
from maxmoe.planning.memory import PARAMETER_DTYPES, parameter_dtype
from maxmoe.planning.plan_search.evaluation import Evaluation
from maxmoe.planning.plan_search.exhaustive import ExhaustiveSearch
from maxmoe.planning.plan_search.model_parts import ModelParts
from maxmoe.planning.plan_search.part_cost import Step
from maxmoe.planning.plan_search.predicted_plan import PredictedPlan
from maxmoe.planning.plan_search.result import NoPlanFits, SearchResult
from maxmoe.planning.plan_search.rule_tables import tables
from maxmoe.planning.saved_tensors import local_trace, saved_tensors
from maxmoe.planning.state_dtypes import StateDtypes
from maxmoe.planning.time_model.device import Device
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.rules import LogicalRules


def search(
    module: nn.Module,
    world_size: int,
    device: Device | str,
    *,
    batch_size: int,
    sequence_length: int,
    memory: int | None = None,
    rules: Sequence[str] | None = None,
    state_dtypes: StateDtypes = PARAMETER_DTYPES,
    num_plans: int = 10,
) -> SearchResult:
    """Search for the plans of a training step that take least time and fit in memory.

    All meshes of `world_size` ranks are tried: every factorisation over the axes that the rules know, with pipeline
    stages of the schedule 1F1B. On each, all rules, numbers of micro-batches, strategies for experts on other ranks,
    chunks of tokens and parts to recompute. Memory and collectives are those of `estimate`, with AdamW; the time is
    that of the model in docs/planning.md. A plan that cannot be among the fastest is left out by a lower bound.

    Args:
        module: module before `maxmoe.parallelize`, on any device, including meta, with parameters of one dtype. Only a
            module that declares `pipeline_parts` and a `residual_stream` is cut into stages.
        world_size: number of ranks.
        device: device and network: a `Device`, the name of one, or a YAML file.
        batch_size: number of sequences per step, over all ranks.
        sequence_length: number of tokens per sequence.
        memory: bytes of a rank; None for those of the device.
        rules: names of presets or YAML files of rules; None for all presets.
        state_dtypes: dtypes of gradients, master weights and moments.
        num_plans: largest number of plans to return.

    Returns:
        The fastest plans in order, and what excludes the others.

    Raises:
        NoPlanFits: if no plan fits in memory, with those that need least.
        ValueError: if no mesh divides the batch, or `parallelize` refuses all plans; for a module whose saved tensors
            are not known, an unknown device or rules, and a device without a peak in the dtype of the parameters.
    """
    for name, value in (("world_size", world_size), ("batch_size", batch_size), ("num_plans", num_plans)):
        check_int(name, value, at_least=1)
    check_int("sequence_length", sequence_length, at_least=1)
    module, device = planned_copy(module), Device.load(device)
    limit = device.memory if memory is None else memory
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(f"memory must be a positive number of bytes, got {limit!r}")
    parts = ModelParts(module)
    on_one_rank = make_plan(parts.whole, Mesh.planned({}), LogicalRules(), allow_unused=True)
    list(saved_tensors(on_one_rank, batch_size, sequence_length))  # raises what every mesh would raise
    dtype = parameter_dtype(on_one_rank)
    device.peak(dtype)
    step = Step(batch_size, sequence_length, 1, dtype, state_dtypes)
    evaluation = Evaluation(parts, device, step)
    run = ExhaustiveSearch(evaluation, world_size, limit, tables(rules), num_plans)
    if not run.num_plans:
        reasons = ", ".join(f"{number} meshes: {reason}" for reason, number in run.cannot_run.items())
        raise ValueError(f"no mesh of {world_size} ranks can run the batch: {reasons or 'the rules have no axes'}")
    run.search()
    if not run.fastest.plans:
        refused = ", ".join(f"{number} plans: {reason}" for reason, number in run.refused.items())
        run.search_smallest()
        if not run.smallest.plans:
            raise ValueError(f"no plan of {world_size} ranks can be made: {refused}")
        raise NoPlanFits(tuple(run.smallest.plans), limit)
    plans = _confirmed(module, run.fastest.plans, step, limit)
    return SearchResult(
        plans=plans,
        num_considered=run.num_plans,
        num_over_memory=run.num_over_memory + len(run.fastest.plans) - len(plans),
        refused=dict(run.refused),
        cannot_run=dict(run.cannot_run),
        limit=limit,
        num_tokens=batch_size * sequence_length,
        world_size=world_size,
        uncounted=local_trace(on_one_rank, batch_size, sequence_length).problem,
    )


def _confirmed(module: nn.Module, plans: Sequence[PredictedPlan], step: Step, limit: int) -> tuple[PredictedPlan, ...]:
    """Return the plans from the first one on that `estimate` says to fit, the first one with its memory."""
    too_large = []
    for index, plan in enumerate(plans):
        before = recompute_of(module)
        set_recompute(module, plan.recompute)
        try:
            costs = estimate(
                module,
                Mesh.planned(plan.mesh),
                plan.rules,
                batch_size=step.batch_size,
                sequence_length=step.sequence_length,
                dispatch=plan.dispatch,
                num_chunks=plan.num_chunks,
                num_micro_batches=plan.num_micro_batches if plan.has_stages else None,
                state_dtypes=step.state_dtypes,
            )
        finally:
            set_recompute(module, before)
        memory = sum(costs.memory.values())
        if memory <= limit:
            return (replace(plan, memory=memory), *plans[index + 1 :])
        too_large.append(replace(plan, memory=memory))
    raise NoPlanFits(tuple(sorted(too_large, key=lambda plan: plan.memory)[:3]), limit)
