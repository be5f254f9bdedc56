"""The collectives of parameters and activations in a training step: the plan of `parallelize`, with sizes."""

from collections.abc import Iterator

import torch
from torch import nn

from maxmoe.parallel.plan import ParameterPlan, Plan, ResidualPart
from maxmoe.planning.saved_tensors import declared_tensors, local_tokens, planned_dispatches
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.planned_collective import PlannedCollective, planned_redistribution
from maxmoe.sharding.redistribute import embed_sharding, summed

FORWARD, BACKWARD, GRADIENTS = "weights, forward", "weights, backward", "gradients of weights"


def parameter_communication(parameter: ParameterPlan, num_calls: int = 1) -> Iterator[PlannedCollective]:
    """List the communication of a parameter and its gradient in a step.

    Args:
        parameter: of the plan.
        num_calls: of its FSDP unit in a forward.

    Yields:
        That of its FSDP unit, then that of FSDP.
    """
    tensor, block = (parameter.parameter.shape, parameter.parameter.dtype), parameter.fsdp_block
    # The whole model as a FSDP unit refills its parameters before FSDP has gathered them: see parameter_hooks.py.
    is_refilled_first = block == parameter.fsdp_unit == "" and parameter.is_gathered
    refill_source = parameter.stored if is_refilled_first else parameter.unsharded
    for _ in range(num_calls):
        yield from planned_redistribution(FORWARD, parameter.unsharded, parameter.used, *tensor)
        yield from planned_redistribution(BACKWARD, refill_source, parameter.used, *tensor)
        yield from planned_redistribution(GRADIENTS, parameter.grad_used, parameter.grad_unsharded, *tensor)
    if block is not None:
        yield from planned_redistribution(FORWARD, parameter.stored, parameter.unsharded, *tensor, block)
        yield from planned_redistribution(BACKWARD, parameter.stored, parameter.unsharded, *tensor, block)
        yield from planned_redistribution(GRADIENTS, parameter.grad_unsharded, parameter.stored, *tensor, block)


def activation_communication(
    plan: Plan, batch_size: int, sequence_length: int, dtype: torch.dtype
) -> Iterator[PlannedCollective]:
    """List the communication of activations: all-reduces of tensor parallelism, keys and values of sharded sequences.

    That of Mixture-of-Experts layers is in `dispatch_communication`.

    Args:
        plan: of the model.
        batch_size: sequences of a step, over all ranks.
        sequence_length: their tokens.
        dtype: of the parameters.

    Yields:
        Those of a step.
    """
    batch, length = local_tokens(plan, batch_size, sequence_length)
    writers = {part.writer for part in plan.residual_parts}
    for unit, axes in plan.tensor_parallel_axes.items():
        if axes and unit not in plan.reduced_by_layer and plan.paths[unit] not in writers:
            shape = (batch, length, _hidden_size(plan, unit))
            reduced = summed(plan.mesh, 3, axes)
            yield from _both_ways(plan, "partial outputs", plan.paths[unit], reduced, reduced, shape, dtype)
    for part in plan.residual_parts:
        yield from _residual_communication(plan, part, (batch, length, part.hidden_size), dtype)
    for path, tensor in declared_tensors(plan, batch_size, sequence_length):
        if "activation_kv_length" in tensor.names and plan.tokens.length_axes:
            sharded, gathered, partial = plan.tokens.sequence_shardings(
                len(tensor.names), tensor.names.index("activation_kv_length")
            )
            yield from _both_ways(
                plan, "keys and values", path, (sharded, gathered), (partial, sharded), tensor.shape, dtype
            )


def _residual_communication(
    plan: Plan, part: ResidualPart, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[PlannedCollective]:
    """List that of a reader and a writer of a sharded residual stream, but for a Mixture-of-Experts layer's own."""

    def partial(axes: tuple[str, ...]) -> NamedSharding:
        return NamedSharding.replicated(plan.mesh, 3, partial=axes)

    outside, whole = embed_sharding(plan.mesh, 3, part.axes), partial(())
    if part.reader is not None:
        gradient = partial(part.partial_axes), outside
        yield from _both_ways(plan, "hidden states", part.reader, (outside, whole), gradient, shape, dtype)
    if part.writer is not None and part.writer not in plan.dispatch_plans:
        parallel = plan.tensor_parallel_axes.get(plan.modules[part.writer], ())
        outputs = partial(parallel), outside
        yield from _both_ways(plan, "partial outputs", part.writer, outputs, (outside, whole), shape, dtype)
        if part.reader is not None:
            yield from planned_redistribution(
                "partial outputs, backward", partial(parallel), partial(part.axes), shape, dtype
            )


def _both_ways(
    plan: Plan,
    purpose: str,
    path: str,
    value: tuple[NamedSharding, NamedSharding],
    gradient: tuple[NamedSharding, NamedSharding],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Iterator[PlannedCollective]:
    yield from planned_redistribution(f"{purpose}, forward", *value, shape, dtype)
    yield from planned_redistribution(f"{purpose}, backward", *gradient, shape, dtype)
    recomputed = plan.recomputed_by(path)
    # A recomputation ends when it has what the backward needs: before the sum of the module's own partial outputs.
    if recomputed is not None and not (purpose == "partial outputs" and recomputed == path):
        yield from planned_redistribution(f"{purpose}, backward", *value, shape, dtype)


def dispatch_communication(
    plan: Plan, batch_size: int, sequence_length: int, num_chunks: int = 1
) -> Iterator[tuple[str, PlannedCollective]]:
    """List the collectives of a step in every Mixture-of-Experts layer, with the path of the layer."""
    for path, tokens in planned_dispatches(plan, batch_size, sequence_length, num_chunks):
        dispatch_plan = plan.dispatch_plans[path]
        for chunk in tokens.chunks():
            for collective in dispatch_plan.strategy_class.planned_collectives(chunk):
                yield path, collective
        for collective in dispatch_plan.partial_sums.planned_collectives(tokens):
            yield path, collective


def _hidden_size(plan: Plan, unit: nn.Module) -> int:
    """The width of the input and the output of a tensor-parallel module: the dim "embed" of its weights."""
    parameter = plan.parameters[next(iter(plan.fsdp_units[unit].values()))].parameter
    return parameter.shape[(parameter.names or ()).index("embed")]
