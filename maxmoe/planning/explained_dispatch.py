"""How the tokens of every Mixture-of-Experts layer reach their experts, why, and with which collectives."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from maxmoe.parallel.dispatch_plan import DispatchPlan
from maxmoe.parallel.plan import Plan
from maxmoe.planning.communication import dispatch_communication
from maxmoe.planning.repeated_layers import grouped
from maxmoe.planning.traffic import Traffic, traffic_of
from maxmoe.sharding.planned_collective import PlannedCollective
from maxmoe.text_table import text_table


@dataclass(frozen=True)
class ExplainedDispatch:
    """The dispatch of one layer.

    Args:
        name: path of the layer.
        plan: strategy, reason and axes.
        traffic: of a rank in one step, between experts; None where the number of tokens is not known.
    """

    name: str
    plan: DispatchPlan
    traffic: tuple[Traffic, ...] | None

    @property
    def num_local_experts(self) -> int:
        """Experts that a rank computes."""
        return self.plan.num_local_experts


def explained_dispatch(plan: Plan, tokens: tuple[int, int] | None, num_chunks: int) -> Iterator[ExplainedDispatch]:
    """Explain the dispatch of the layers of a plan.

    Args:
        plan: of the model.
        tokens: batch size and sequence length over all ranks; None where they are not known.
        num_chunks: see `maxmoe.parallelize`.

    Yields:
        A layer after the other.
    """
    communication: dict[str, list[PlannedCollective]] = defaultdict(list)
    for path, item in dispatch_communication(plan, *tokens, num_chunks) if tokens else ():
        communication[path].append(item)
    for path, (_, dispatch_plan) in plan.layers.items():
        yield ExplainedDispatch(path, dispatch_plan, traffic_of(communication[path]) if tokens else None)


def dispatch_tables(layers: Iterable[ExplainedDispatch], width: int | None) -> Iterator[str]:
    """Write the dispatch of layers, repeated ones in one row.

    Args:
        layers: in order.
        width: see `text_table`.

    Yields:
        A table of strategies and axes; then one of collectives for each kind of layer that has any.
    """
    groups = grouped(layers, lambda layer: layer.name, lambda layer: (layer.plan, layer.traffic))
    heading = ("MoE layer", "dispatch", "because", "axes", "experts of a rank")
    rows = [
        (
            label or "the layer",
            layer.plan.strategy,
            layer.plan.reason,
            _axes_text(layer.plan),
            f"{layer.num_local_experts} of {layer.plan.config.num_experts}",
        )
        for label, (layer, *_) in groups
    ]
    if rows:
        yield text_table([heading, *rows], right=[4], width=width)
    for label, (layer, *others) in groups:
        if layer.traffic:
            columns = ("kind", "axis", "times", "bytes sent, and received, by a rank")
            title = f"in a step, {'one of ' if others else ''}{label or 'the layer'}"
            yield text_table([(title, *columns), *(row.cells for row in layer.traffic)], right=[3, 4], width=width)


def _axes_text(plan: DispatchPlan) -> str:
    parts = (
        ("tokens travel over", plan.token_axes),
        ("same tokens, other experts over", plan.replicated_axes),
        ("parts of each expert over", plan.tensor_parallel_axes),
    )
    return " | ".join(f"{what} {' '.join(axes)}" for what, axes in parts if axes) or "-"
