"""Plan of a model and of its pipeline stages, for `explain` and `estimate`."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from maxmoe.checks.fields import check_number
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.plan import Plan
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.pipelining.pipeline_plan import PipelineOptions, PipelinePlan, plan_pipeline
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh
from maxmoe.sharding.rules import LogicalRules


def plan_model(
    module: nn.Module,
    mesh: Mesh,
    rules: LogicalRules,
    *,
    dispatch: Dispatch,
    num_chunks: int,
    allow_unused: bool,
    schedule: str,
    num_micro_batches: int | None,
    blocks_per_stage: Sequence[int] | None,
    stages_per_rank: int | None,
) -> tuple[Plan, PipelinePlan | None]:
    """Plan a whole model on the ranks of a stage, and its stages if there are micro-batches and an axis `stage`."""
    is_cut = num_micro_batches is not None and mesh.size(STAGE_AXIS) > 1
    within = mesh.within_stage() if is_cut else mesh
    plan = make_plan(module, within, rules, dispatch=dispatch, num_chunks=num_chunks, allow_unused=allow_unused)
    if num_micro_batches is None or not is_cut:
        return plan, None
    options = PipelineOptions(schedule, num_micro_batches, blocks_per_stage, stages_per_rank)
    return plan, plan_pipeline(module, mesh, rules, options, dispatch=dispatch, num_chunks=num_chunks)


def with_imbalance(plan: Plan, imbalance: float, *, has_stages: bool) -> Plan:
    """Return a plan that assumes an imbalance in every layer; 1.0 for balanced routing."""
    check_number("imbalance", imbalance, at_least=1.0)
    if imbalance == 1.0:
        return plan
    if has_stages:
        raise ValueError(f"imbalance must be 1.0 with pipeline stages, got {imbalance}")
    for path, (_, dispatch) in plan.layers.items():
        num_ranks = dispatch.mesh.size(*dispatch.group_axes)
        if not dispatch.strategy_class.moves_experts:
            raise ValueError(
                f"imbalance ({imbalance}) needs dispatch='least_loaded' and tokens that are sent, got "
                f"{dispatch.strategy!r} with tokens sent over {dispatch.token_axes} in {path or 'the layer'}: other "
                "strategies are planned for balanced routing"
            )
        if imbalance > num_ranks:
            raise ValueError(
                f"imbalance must be at most the number of ranks that share the experts ({num_ranks}), got {imbalance}"
            )
    modules = dict(plan)
    for path, module in plan.items():
        if module.dispatch is not None:
            modules[path] = replace(module, dispatch=replace(module.dispatch, imbalance=imbalance))
    return replace(plan, modules=modules)
