"""Saved tensors on a rank, as modules declare them and dispatch strategies list them."""

import math
from collections.abc import Iterator, Mapping

import torch

from maxmoe.declaration import EXPERT_TOKEN_DIMS, SavedTensor, declaration_of
from maxmoe.parallel.dispatch import PlannedDispatch
from maxmoe.parallel.plan.dispatch_plan import DispatchPlan
from maxmoe.parallel.plan.parameter_sharding import tensor_parallel_activation
from maxmoe.parallel.plan.plan import ModulePlan, Plan
from maxmoe.planning.traced_forward import Trace, trace, traced_modules


def local_tokens(plan: Plan, batch_size: int, sequence_length: int) -> tuple[int, int]:
    """Return the number of sequences and the number of tokens of each sequence on this rank.

    Raises a ValueError if the axes that shard the tokens do not divide the global batch.
    """
    tokens = plan.tokens
    for axes, length, argument in (
        (tokens.batch_axes, batch_size, "batch_size"),
        (tokens.length_axes, sequence_length, "sequence_length"),
    ):
        if length % plan.mesh.size(*axes):
            product = " * ".join(f"{axis}={plan.mesh.size(axis)}" for axis in axes)
            raise ValueError(f"{argument} ({length}) must be divisible by {product}, over which it is sharded")
    return batch_size // plan.mesh.size(*tokens.batch_axes), sequence_length // plan.mesh.size(*tokens.length_axes)


def micro_batch_sizes(plan: Plan, batch_size: int, sequence_length: int, count: int) -> list[int]:
    """Return the number of sequences of each micro-batch over all ranks, the largest first.

    Raises a ValueError if the axes that shard the tokens do not divide the global batch.
    """
    rows, _ = local_tokens(plan, batch_size, sequence_length)
    num_parts = batch_size // rows
    return [(rows // count + (index < rows % count)) * num_parts for index in range(count)]


def saved_tensors(
    plan: Plan, batch_size: int, sequence_length: int, num_chunks: int = 1
) -> Iterator[tuple[str, SavedTensor]]:
    """List the tensors that autograd saves on a rank if routing is balanced, with the path of the module."""
    yield from declared_tensors(plan, batch_size, sequence_length)
    yield from traced_tensors(plan, batch_size, sequence_length)
    for path, tokens in planned_dispatches(plan, batch_size, sequence_length, num_chunks):
        layer, dispatch = plan.layers[path]
        # Attributed to the routed experts, because they are recomputed together.
        experts = next(inner for inner, planned in plan.items() if planned.module is layer.routed_experts)
        for tensor in dispatch.strategy_class.planned_saved_tensors(tokens):
            yield experts, tensor


def planned_dispatches(
    plan: Plan, batch_size: int, sequence_length: int, num_chunks: int = 1
) -> Iterator[tuple[str, PlannedDispatch]]:
    """List the tokens that a rank dispatches in every MoE layer, with the path of the layer."""
    num_tokens = math.prod(local_tokens(plan, batch_size, sequence_length))
    for path, (layer, dispatch) in plan.layers.items():
        tokens = PlannedDispatch(
            dispatch,
            num_tokens,
            dispatch.num_chunks(num_chunks),
            layer.expert_dtype,
            is_recomputed=plan.recomputed_by(path) is not None,
            recomputes_input="dispatch" in layer.recompute,
            expert_bytes=_expert_bytes(plan, f"{path}.experts.".removeprefix("."), dispatch),
        )
        yield path, tokens


def _expert_bytes(plan: Plan, prefix: str, dispatch: DispatchPlan) -> tuple[tuple[int, bool], ...]:
    """Return the bytes of one expert in each stack of weights, factors and parts of quantized weights included."""
    return tuple(
        (parameter.bytes(parameter.used) // dispatch.num_local_experts, parameter.is_trained)
        for name, parameter in plan.parameters.items()
        if name.startswith(prefix)
    )


def traced_tensors(plan: Plan, batch_size: int, sequence_length: int) -> Iterator[tuple[str, SavedTensor]]:
    """List the bytes that the trace of the model counts, with the module that is recomputed or saves them."""
    for where, count in local_trace(plan, batch_size, sequence_length).saved.items():
        if has_module(plan, where.path):
            is_argument = any(outer in plan and plan[outer].is_recomputed for outer in where.argument_of)
            path = None if is_argument else plan.recomputed_by(where.path)
            yield path or "", SavedTensor((count,), (None,), torch.uint8, is_kept=path is None)


def has_module(plan: Plan, path: str) -> bool:
    """Return whether a plan of a part of a model has the module at a path, not only its parts."""
    return path in plan and plan[path].module is plan.model.get_submodule(path)


def local_trace(plan: Plan, batch_size: int, sequence_length: int) -> Trace:
    """Trace the forward of a model with the tokens and the parameters of a rank; see `trace`."""
    traced = traced_modules(plan.model)
    shapes = tuple(
        (name, parameter.used.shard_shape(parameter.parameter.shape))
        for name, parameter in (plan.parameters.items() if traced else ())
        if any(parameter.used.spec) and name.rpartition(".")[0] in traced
    )
    return trace(plan.model, *local_tokens(plan, batch_size, sequence_length), shapes)


def declared_tensors(plan: Plan, batch_size: int, sequence_length: int) -> Iterator[tuple[str, SavedTensor]]:
    """List the tensors of `saved_tensors` that modules declare."""
    local_tokens(plan, batch_size, sequence_length)
    residual = {
        "activation_batch": plan.mesh.size(*plan.tokens.batch_axes),
        "activation_length": plan.mesh.size(*plan.tokens.length_axes),
        "activation_embed": plan.mesh.size(*plan.embed_axes),
    }
    for path, module in plan.items():
        declaration = declaration_of(module.module)
        if declaration.saved_tensors is None:
            continue
        computed_in_parts = map(tensor_parallel_activation, declaration.tensor_parallel_dims)
        num_parts = residual | dict.fromkeys(computed_in_parts, plan.mesh.size(*module.tensor_parallel_axes))
        for tensor in declaration.saved_tensors(batch_size, sequence_length).values():
            yield path, tensor._replace(shape=_local_shape(plan, module, tensor, num_parts))


def _local_shape(plan: Plan, module: ModulePlan, tensor: SavedTensor, num_parts: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape on a rank, given the number of parts of each activation dim."""
    local = [length // num_parts.get(name or "", 1) for length, name in zip(tensor.shape, tensor.names, strict=True)]
    num_dims = len(EXPERT_TOKEN_DIMS)
    if tensor.names[:num_dims] != EXPERT_TOKEN_DIMS:
        return tuple(local)
    # The rows of all tokens are on the ranks of their experts: each axis of the tokens or of the experts divides them.
    axes = {*plan.tokens.axes, *(() if module.dispatch is None else module.dispatch.expert_axes)}
    return (math.prod(local[:num_dims]) // plan.mesh.size(*axes), *local[num_dims:])
