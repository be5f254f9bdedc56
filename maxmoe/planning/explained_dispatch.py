"""Dispatch strategy of every Mixture-of-Experts layer, with its reason and its collectives."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from maxmoe.parallel.dispatch.least_loaded import planned_moves
from maxmoe.parallel.dispatch.planned_moves import PlannedMoves
from maxmoe.parallel.plan.dispatch_plan import DispatchPlan
from maxmoe.parallel.plan.plan import Plan
from maxmoe.planning.communication import dispatch_communication
from maxmoe.planning.repeated_layers import group_repeated
from maxmoe.planning.saved_tensors import planned_dispatches
from maxmoe.planning.traffic import Traffic, traffic_of
from maxmoe.sharding.planned_collective import PlannedCollective
from maxmoe.text_table import paragraph, text_table


@dataclass(frozen=True)
class ExplainedDispatch:
    """The dispatch of one layer.

    Args:
        name: path of the layer.
        plan: strategy, reason and axes.
        traffic: collectives of the dispatch per step; None if the number of tokens is not given.
        moves: moves of experts in the first chunk at the imbalance of the plan; None for balanced routing.
    """

    name: str
    plan: DispatchPlan
    traffic: tuple[Traffic, ...] | None
    moves: PlannedMoves | None = None


def explain_dispatch(
    plan: Plan, micro_batches: Sequence[int], sequence_length: int, num_chunks: int
) -> Iterator[ExplainedDispatch]:
    """Explain the dispatch of every layer of a plan.

    Args:
        plan: plan of the model.
        micro_batches: number of sequences of each micro-batch over all ranks; empty if it is not given.
        sequence_length: number of tokens of each sequence over all ranks.
        num_chunks: number of chunks of the tokens of a layer.
    """
    communication: dict[str, list[PlannedCollective]] = defaultdict(list)
    moves = {
        path: planned_moves(next(tokens.chunks()))
        for size in micro_batches[:1]
        for path, tokens in planned_dispatches(plan, size, sequence_length, num_chunks)
        if tokens.layout.imbalance != 1.0
    }
    for size in micro_batches:
        for path, item in dispatch_communication(plan, size, sequence_length, num_chunks):
            communication[path].append(item)
    for path, (_, dispatch_plan) in plan.layers.items():
        traffic = traffic_of(communication[path]) if micro_batches else None
        yield ExplainedDispatch(path, dispatch_plan, traffic, moves.get(path))


def dispatch_tables(layers: Iterable[ExplainedDispatch], width: int | None) -> Iterator[str]:
    """Yield a table of strategies and axes, then a table of collectives for each group of repeated layers with any."""
    groups = group_repeated(layers, lambda layer: layer.name, lambda layer: (layer.plan, layer.traffic))
    heading = ("MoE layer", "dispatch", "reason", "axes", "experts per rank")
    rows = [
        (
            label or "the layer",
            layer.plan.strategy,
            layer.plan.reason,
            _axes_text(layer.plan),
            f"{layer.plan.num_local_experts} of {layer.plan.config.num_experts}",
        )
        for label, (layer, *_) in groups
    ]
    if rows:
        yield text_table([heading, *rows], right=[4], width=width)
    for label, (layer, *others) in groups:
        if layer.moves is not None:
            yield paragraph(f"{label or 'the layer'}: {_moves_text(layer.moves)}", width=width)
        if layer.traffic:
            columns = ("kind", "axis", "times", "bytes sent per rank")
            title = f"collectives per step in {'one of ' if others else ''}{label or 'the layer'}"
            yield text_table([(title, *columns), *(row.cells for row in layer.traffic)], right=[3, 4], width=width)


def _moves_text(moves: PlannedMoves) -> str:
    number = len(moves.moves)
    sent = f"{number or 'no'} expert{' is' if number == 1 else 's are'} sent to other ranks"
    return (
        f"if one rank has {moves.tokens.layout.imbalance:g} times the mean number of rows, with all rows above an even "
        f"load at one expert, {sent}, and no rank computes more than {moves.most_rows:.2f} times the mean."
    )


def _axes_text(plan: DispatchPlan) -> str:
    parts = (
        ("tokens sent over", plan.token_axes),
        ("tokens replicated over", plan.replicated_axes),
        ("tensor parallelism over", plan.tensor_parallel_axes),
    )
    return " | ".join(f"{role} {' '.join(axes)}" for role, axes in parts if axes) or "-"
