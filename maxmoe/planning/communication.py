"""Collectives of parameters and activations in a training step: the plan of `parallelize`, with sizes."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from maxmoe.parallel.plan.plan import ParameterPlan, Plan
from maxmoe.planning.saved_tensors import declared_tensors, local_tokens, planned_dispatches
from maxmoe.sharding.planned_collective import PlannedCollective, planned_redistribution


def parameter_communication(plan: Plan, num_chunks: int) -> Iterator[PlannedCollective]:
    """List the collectives of parameters and their gradients."""
    for path, module in plan.items():
        num_calls = 1
        if module.dispatch is not None and path not in plan.layers:
            # Routed experts run once for each chunk of the tokens, and gather their parameters each time.
            num_calls = module.dispatch.num_chunks(num_chunks)
        # Parameters of a module with the same shape and shardings have the same collectives.
        planned: dict[ParameterPlan, list[PlannedCollective]] = {}
        for parameter in module.parameters.values():
            alike = replace(parameter, name="", parameter=replace(parameter.parameter, names=None, dropped=()))
            if alike not in planned:
                planned[alike] = list(parameter.planned_collectives(num_calls))
            yield from planned[alike]
        yield from module.planned_reductions(num_calls)


def activation_communication(
    plan: Plan, batch_size: int, sequence_length: int, dtype: torch.dtype
) -> Iterator[PlannedCollective]:
    """List the collectives of activations outside of MoE layers, for a global batch of hidden states in `dtype`."""
    tokens = local_tokens(plan, batch_size, sequence_length)
    for path, module in plan.items():
        recomputed = plan.recomputed_by(path)
        if (hooks := module.tensor_parallel_hooks) is not None:
            # A recomputation ends before the module's own partial outputs are summed.
            again = recomputed not in (None, path)
            yield from hooks.planned_collectives((*tokens, module.hidden_size), dtype, is_repeated=again)
        if (reader := module.residual_reader) is not None:
            again = recomputed is not None
            yield from reader.planned_collectives((*tokens, module.hidden_size), dtype, is_repeated=again)
    for path, tensor in declared_tensors(plan, batch_size, sequence_length):
        if "activation_kv_length" in tensor.names and plan.tokens.length_axes:
            dims = len(tensor.names), tensor.names.index("activation_kv_length")
            again = plan.recomputed_by(path) is not None
            yield from planned_redistribution(
                "keys and values",
                plan.tokens.sequence_redistribution(*dims),
                tensor.shape,
                dtype,
                is_repeated=again,
            )


def dispatch_communication(
    plan: Plan, batch_size: int, sequence_length: int, num_chunks: int = 1
) -> Iterator[tuple[str, PlannedCollective]]:
    """List the collectives in every MoE layer, with the path of the layer."""
    for path, tokens in planned_dispatches(plan, batch_size, sequence_length, num_chunks):
        _, dispatch = plan.layers[path]
        for collective in dispatch.strategy_class.planned_collectives(tokens):
            yield path, collective
        for collective in dispatch.partial_sums.planned_collectives(tokens):
            yield path, collective
