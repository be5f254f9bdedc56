"""Predicted time of one plan."""

from collections.abc import Collection

import torch
from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.nn import recompute_of, set_recompute
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.pipelining.schedules import check_schedule
from maxmoe.planning.memory import PARAMETER_DTYPES, parameter_dtype
from maxmoe.planning.plan_search.candidates import Candidates
from maxmoe.planning.plan_search.evaluation import Evaluation
from maxmoe.planning.plan_search.model_parts import ModelParts
from maxmoe.planning.plan_search.part_cost import Step
from maxmoe.planning.plan_search.predicted_plan import PredictedPlan
from maxmoe.planning.saved_tensors import local_trace
from maxmoe.planning.state_dtypes import StateDtypes
from maxmoe.planning.time_model.device import Device
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh
from maxmoe.sharding.rules import LogicalRules


def predict(
    module: nn.Module,
    mesh: Mesh,
    rules: LogicalRules | str,
    device: Device | str,
    *,
    batch_size: int,
    sequence_length: int,
    dispatch: Dispatch = "auto",
    num_chunks: int = 1,
    recompute: Collection[str] | None = None,
    num_micro_batches: int = 1,
    state_dtypes: StateDtypes = PARAMETER_DTYPES,
) -> PredictedPlan:
    """Predict the time and the memory of a training step with one plan, by the model in docs/planning.md.

    Args:
        module: module before `maxmoe.parallelize`, on any device, including meta, with parameters of one dtype.
        mesh: mesh of real or planned ranks; ranks of a node are neighbours along the last axes.
        rules: table of rules, or the name of a preset.
        device: device and network: a `Device`, the name of one, or a YAML file.
        batch_size: number of sequences per step, over all ranks.
        sequence_length: number of tokens per sequence.
        dispatch: strategy for experts on other ranks, as for `maxmoe.parallelize`.
        num_chunks: number of chunks of the tokens of a MoE layer.
        recompute: names of the parts that are recomputed in the backward; None for the setting of the module.
        num_micro_batches: number of micro-batches on a mesh with an axis `stage`, with the schedule 1F1B.
        state_dtypes: dtypes of gradients, master weights and moments.

    Returns:
        The plan with its costs.

    Raises:
        ValueError: as `estimate`; for an unknown device, and one without a peak in the dtype of the parameters; for
            pipeline stages of a module that does not declare `pipeline_parts` and a `residual_stream`.
    """
    module, loaded, table = planned_copy(module), Device.load(device), LogicalRules.load(rules)
    one = make_plan(module, Mesh.planned({}), LogicalRules(), allow_unused=True)
    step = Step(batch_size, sequence_length, 1, parameter_dtype(one), state_dtypes)
    sizes = {axis: size for axis, size in mesh.sizes.items() if size > 1}
    meshes = Candidates({axis: torch.tensor([size]) for axis, size in sizes.items()}, torch.tensor([num_micro_batches]))
    parts = ModelParts(module)
    check_schedule("1f1b", mesh.size(STAGE_AXIS), None, num_micro_batches)
    if meshes.has_stages and not parts.can_be_cut:
        raise ValueError(
            f"{type(module).__name__} must declare pipeline_parts and a residual_stream to be planned with pipeline "
            f"stages, got {mesh}"
        )
    before = recompute_of(module)
    names = tuple(before if recompute is None else recompute)
    set_recompute(module, names)
    try:
        planned = Evaluation(parts, loaded, step).plan(meshes, table, dispatch)
        memory, cost = planned.memory(), planned.cost(num_chunks)
    finally:
        set_recompute(module, before)
    return PredictedPlan.of(
        cost,
        memory,
        0,
        rules=rules,
        mesh=sizes,
        dispatch=dispatch,
        num_chunks=num_chunks,
        recompute=names,
        num_micro_batches=num_micro_batches,
        uncounted=local_trace(one, batch_size, sequence_length).problem,
    )
