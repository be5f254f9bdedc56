"""Collectives of a training step: of parameters, activations and tokens of MoE layers; their sums."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from maxmoe.parallel.plan.plan import ParameterPlan, Plan
from maxmoe.planning.planned_batch import PlannedBatch
from maxmoe.sharding.planned_collective import PlannedCollective, planned_redistribution


class Traffic(NamedTuple):
    """Collectives per step with the same purpose, kind and mesh axis.

    Args:
        purpose: tensors that are communicated, and whether in the forward or in the backward.
        kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", or "send" for messages between stages.
        axis: mesh axis; "context, expert" for the ranks along both axes.
        times: number of collectives.
        bytes: number of bytes that a rank sends in all of them, and receives; see `PlannedCollective`.
    """

    purpose: str
    kind: str
    axis: str
    times: int
    bytes: int


def times_and_bytes(
    collectives: Iterable[PlannedCollective],
) -> dict[tuple[str, str, tuple[str, ...]], tuple[int, int]]:
    """Count collectives and their bytes by purpose, kind and axes. Collectives with the same bucket count once."""
    total: dict[tuple[str, str, tuple[str, ...]], tuple[int, int]] = {}
    buckets = set()
    for purpose, kind, axes, num_bytes, bucket in collectives:
        key = (purpose, kind, axes)
        times, so_far = total.get(key, (0, 0))
        is_new = bucket is None or (key, bucket) not in buckets
        buckets.add((key, bucket))
        total[key] = times + is_new, so_far + num_bytes
    return total


def traffic_of(collectives: Iterable[PlannedCollective]) -> tuple[Traffic, ...]:
    """Add up collectives by purpose, kind and axis, sorted. Collectives with the same bucket count once."""
    total = times_and_bytes(collectives).items()
    return tuple(sorted(Traffic(purpose, kind, ", ".join(axes), *sums) for (purpose, kind, axes), sums in total))


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


def activation_communication(batch: PlannedBatch) -> Iterator[PlannedCollective]:
    """List the collectives of activations outside of MoE layers."""
    plan, tokens, dtype = batch.plan, batch.local_tokens, batch.dtype
    for path, module in plan.items():
        recomputed = plan.recomputed_by(path)
        if (hooks := module.tensor_parallel_hooks) is not None:
            # A recomputation ends before the module's own partial outputs are summed.
            again = recomputed not in (None, path)
            yield from hooks.planned_collectives((*tokens, module.hidden_size), dtype, is_repeated=again)
        if (reader := module.residual_reader) is not None:
            again = recomputed is not None
            yield from reader.planned_collectives((*tokens, module.hidden_size), dtype, is_repeated=again)
    for path, (shape, names, *_) in batch.declared_tensors() if plan.tokens.length_axes else ():
        if "activation_kv_length" in names:
            redistribution = plan.tokens.sequence_redistribution(len(names), names.index("activation_kv_length"))
            again = plan.recomputed_by(path) is not None
            yield from planned_redistribution("keys and values", redistribution, shape, dtype, is_repeated=again)


def dispatch_communication(batch: PlannedBatch) -> Iterator[PlannedCollective]:
    """List the collectives in every MoE layer."""
    for path, tokens in batch.dispatches():
        _, dispatch = batch.plan.layers[path]
        yield from dispatch.strategy_class.planned_collectives(tokens)
        yield from dispatch.partial_sums.planned_collectives(tokens)
