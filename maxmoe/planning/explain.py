"""Sharding of every parameter and dispatch of every Mixture-of-Experts layer, with the reasons."""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.parallel.dispatch.least_loaded import PlannedMoves, planned_moves
from maxmoe.parallel.parallelize import undeclared_modules
from maxmoe.parallel.plan.dispatch_plan import Dispatch, DispatchPlan
from maxmoe.parallel.plan.parameter_sharding import ParameterSharding
from maxmoe.parallel.plan.plan import Plan
from maxmoe.pipelining.pipeline_plan import PipelinePlan
from maxmoe.planning.communication import Traffic, dispatch_communication, traffic_of
from maxmoe.planning.pipeline_estimate import stage_table
from maxmoe.planning.plan_model import pipeline_options, plan_model
from maxmoe.planning.saved_tensors import micro_batch_sizes, planned_dispatches
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.planned_collective import PlannedCollective
from maxmoe.sharding.rules import DroppedAxis, LogicalRules
from maxmoe.text_table import paragraph, ranges, readable_bytes, terminal_width, text_table

# A replicated parameter is large if it takes at least this share of the bytes of a rank.
LARGE_SHARE = 0.01
# Number of parameters that a sentence lists.
LISTED = 3

Item = TypeVar("Item")


@dataclass(frozen=True)
class ExplainedParameter:
    """Sharding of a parameter, and the rules that determine it.

    Args:
        name: path of the parameter.
        parameter: logical names of the parameter, the axes that the rules request and the axes that shard it.
        rules: for each dim, the axes of the rule that applies; None if no rule applies.
        local_shape: shape of the shard of every rank.
        local_bytes: bytes of the shard of every rank.
    """

    name: str
    parameter: ParameterSharding
    rules: tuple[tuple[str, ...] | None, ...]
    local_shape: tuple[int, ...]
    local_bytes: int

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole parameter."""
        return self.local_shape == self.parameter.shape

    @property
    def indivisible(self) -> tuple[DroppedAxis, ...]:
        """Mesh axes that cannot shard the parameter evenly."""
        sizes = self.parameter.sharding.mesh.sizes
        return tuple(drop for drop in self.parameter.dropped if sizes.get(drop.axis, 1) > 1)


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


@dataclass(frozen=True)
class Explanation:
    """Result of `explain`. As a string, tables as wide as the terminal, with repeated layers in one row.

    Args:
        mesh: mesh of the plan.
        parameters: parameters in the order of `named_parameters`, shared ones once.
        dispatch: dispatch of each Mixture-of-Experts layer.
        unknown_names: logical names without a rule.
        axes_of_tokens: for each activation name, the axes of its rule without effect, because they shard the tokens.
        undeclared_modules: warning for modules that may mix the tokens of sharded sequences, or None.
        pipeline: plan of the pipeline stages; None if the model is not cut into stages.
    """

    mesh: Mesh
    parameters: tuple[ExplainedParameter, ...]
    dispatch: tuple[ExplainedDispatch, ...]
    unknown_names: tuple[str, ...]
    axes_of_tokens: Mapping[str, tuple[str, ...]]
    undeclared_modules: str | None = None
    pipeline: PipelinePlan | None = None

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters, over all ranks; weights, not bytes, of quantized experts."""
        return sum(parameter.parameter.num_weights for parameter in self.parameters)

    @property
    def local_bytes(self) -> int:
        """Bytes of the parameters per rank, equal on all ranks; with pipeline stages, the sum over the stages."""
        return sum(parameter.local_bytes for parameter in self.parameters)

    @property
    def _groups(self) -> list[tuple[str, list[ExplainedParameter]]]:
        return group_repeated(self.parameters, lambda parameter: parameter.name, lambda parameter: parameter.parameter)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Parts of the plan that may be unintended."""
        large = [
            f"{label} is replicated on every rank: {readable_bytes(local_bytes)}, "
            f"{local_bytes / self.local_bytes:.0%} of the parameters of a rank"
            for label, group in self._groups
            if group[0].is_replicated
            and self.mesh.num_ranks > 1
            and (local_bytes := sum(parameter.local_bytes for parameter in group)) >= LARGE_SHARE * self.local_bytes
        ]
        labels = [label for label, group in self._groups if group[0].parameter.names is None]
        unnamed = [f"parameters without logical names are not sharded: {_listed(labels)}"] if labels else []
        unknown = [f"no rule for the logical name {name!r}: its dims are not sharded" for name in self.unknown_names]
        of_tokens = [
            f"the rule {name!r} has no effect over {' '.join(axes)}: that shards the tokens, and every rank computes "
            "the whole dim for its own"
            for name, axes in self.axes_of_tokens.items()
        ]
        mixing = [] if self.undeclared_modules is None else [self.undeclared_modules]
        return (*large, *unnamed, *unknown, *of_tokens, *mixing)

    def __str__(self) -> str:
        heading = ("parameter", "logical names and their rules", "on the mesh", "local shape", "bytes per rank")
        rows = [
            (
                label,
                self._rules_text(group[0]),
                " | ".join(" ".join(axes) or "-" for axes in group[0].parameter.sharding.spec),
                str(list(group[0].local_shape)),
                readable_bytes(sum(parameter.local_bytes for parameter in group)),
            )
            for label, group in self._groups
        ]
        total = f"all {self.num_parameters:,} parameters{', over all stages' if self.pipeline else ''}"
        rows.append((total, "", "", "", readable_bytes(self.local_bytes)))
        width = terminal_width()
        remarks = (paragraph(remark, width=width) for remark in self._remarks())
        first = [paragraph(line, width=width) + "\n" for line in self._first_lines()]
        parameters = "\n".join([*first, text_table([heading, *rows], right=[4], width=width), *remarks])
        stages = () if self.pipeline is None else (stage_table(self.pipeline),)
        return "\n\n".join([parameters, *stages, *dispatch_tables(self.dispatch, width)])

    def _first_lines(self) -> Iterator[str]:
        """Yield what a plan on many ranks must not hide: the bytes that all ranks hold because dims do not divide."""
        groups = [(label, group) for label, group in self._groups if group[0].is_replicated and group[0].indivisible]
        total = sum(parameter.local_bytes for _, group in groups for parameter in group)
        if total >= LARGE_SHARE * self.local_bytes and total:
            axes = dict.fromkeys(drop.axis for _, group in groups for drop in group[0].indivisible)
            labels = _listed([label for label, _ in groups])
            sizes = ", ".join(f"{axis}={self.mesh.size(axis)}" for axis in axes)
            yield (
                f"Every rank holds {readable_bytes(total)} of {readable_bytes(self.local_bytes)} of parameters whole, "
                f"because {sizes} does not divide their dims: {labels}."
            )

    def _rules_text(self, parameter: ExplainedParameter) -> str:
        texts = []
        for name, axes in zip(parameter.parameter.names or (), parameter.rules, strict=False):
            without = "no rule" if name in self.unknown_names else "its axes are taken"
            applied = without if axes is None else " ".join(axes) or "-"
            texts.append("-" if name is None else f"{name}: {applied}")
        return " | ".join(texts) or "no names"

    def _remarks(self) -> Iterator[str]:
        absent = {drop.axis: None for parameter in self.parameters for drop in parameter.parameter.dropped}
        absent_axes = [axis for axis in absent if self.mesh.size(axis) == 1]
        if absent_axes:
            yield f"Axes of the rules that this mesh lacks, or has with size 1: {', '.join(absent_axes)}."
        for label, group in self._groups:
            for axis, dim, reason in group[0].indivisible:
                yield f"Dropped: {axis} from dim {dim} of {label}: {reason}."
        for warning in self.warnings:
            yield f"Warning: {warning}."


def explain(
    module: nn.Module,
    mesh: Mesh,
    rules: LogicalRules | str = "default",
    *,
    dispatch: Dispatch = "auto",
    num_chunks: int = 1,
    imbalance: float = 1.0,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    allow_unused: bool = False,
    schedule: str = "1f1b",
    num_micro_batches: int | None = None,
    blocks_per_stage: Sequence[int] | None = None,
    stages_per_rank: int | None = None,
) -> Explanation:
    """Explain how `parallelize` shards every parameter of a module and dispatches tokens to experts, with the reasons.

    Args:
        module: module with logical names (see `Declaration`), on any device, including meta.
        mesh: mesh of real or planned ranks.
        rules: table of rules, or the name of a preset.
        dispatch: strategy for experts on other ranks, as for `maxmoe.parallelize`.
        num_chunks: number of chunks of the tokens of a MoE layer.
        imbalance: with dispatch="least_loaded", number of rows of the rank with the most rows over the mean, before
            experts are moved; one expert has all rows above an even load. The collectives are then those of the rank
            that sends most. Needs `batch_size` and `sequence_length`.
        allow_unused: accept rules and mesh axes without effect.
        batch_size: number of sequences per step, over all ranks; None to leave out the collectives of the dispatch.
        sequence_length: number of tokens per sequence; None to leave out the collectives of the dispatch.
        schedule: schedule of the pipeline stages, as for `maxmoe.pipeline`.
        num_micro_batches: number of micro-batches of a step; None to explain the whole model, without pipeline stages,
            also on a mesh with an axis `stage`.
        blocks_per_stage: number of blocks of each stage, as for `maxmoe.pipeline`.
        stages_per_rank: number of stages of each rank, as for `maxmoe.pipeline`.

    Raises:
        ValueError: as `parameter_shardings`, `plan_dispatch` and `maxmoe.pipeline`; if axes that shard the tokens do
            not divide them.
    """
    module, rules = planned_copy(module), LogicalRules.load(rules)
    plan, pipeline = plan_model(
        module,
        mesh,
        rules,
        pipeline_options(schedule, num_micro_batches, blocks_per_stage, stages_per_rank),
        dispatch=dispatch,
        num_chunks=num_chunks,
        imbalance=imbalance,
        allow_unused=allow_unused,
    )
    if imbalance != 1.0 and (batch_size is None or sequence_length is None):
        raise ValueError(
            f"imbalance ({imbalance}) needs batch_size and sequence_length, got {batch_size} and {sequence_length}"
        )
    parameters = plan.parameters
    micro_batches: list[int] = []
    if batch_size is not None and sequence_length is not None:
        count = 1 if pipeline is None else pipeline.options.num_micro_batches
        micro_batches = micro_batch_sizes(plan, batch_size, sequence_length, count)
    names = dict.fromkeys(name for parameter in parameters.values() for name in parameter.parameter.names or ())
    return Explanation(
        mesh,
        tuple(
            ExplainedParameter(
                name,
                parameters[name].parameter,
                _applied_rules(parameters[name].parameter, rules),
                parameters[name].stored.shard_shape(parameters[name].parameter.shape),
                parameters[name].bytes(parameters[name].stored),
            )
            for name, _ in module.named_parameters()
        ),
        tuple(explain_dispatch(plan, micro_batches, sequence_length or 0, num_chunks)),
        tuple(name for name in names if name is not None and name not in rules.names),
        plan.axes_of_tokens,
        undeclared_modules(plan),
        pipeline,
    )


def _listed(labels: Sequence[str]) -> str:
    """Join the first labels, and the number of the others."""
    return ", ".join([*labels[:LISTED], *([f"and {len(labels) - LISTED} more"] if len(labels) > LISTED else [])])


def _applied_rules(parameter: ParameterSharding, rules: LogicalRules) -> tuple[tuple[str, ...] | None, ...]:
    """Return for each dim the axes of its rule, as `parameter.requested`, but None if no rule applies."""
    names = parameter.names or (None,) * len(parameter.shape)
    return tuple(axes if (name, axes) in rules else None for name, axes in zip(names, parameter.requested, strict=True))


def explain_dispatch(
    plan: Plan, micro_batches: Sequence[int], sequence_length: int, num_chunks: int
) -> Iterator[ExplainedDispatch]:
    """Explain the dispatch of every layer; `micro_batches` are their numbers of sequences over all ranks, if known."""
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


def group_repeated(
    items: Iterable[Item], path: Callable[[Item], str], key: Callable[[Item], Hashable]
) -> list[tuple[str, list[Item]]]:
    """Group items with equal keys whose paths differ in one number, under labels as "blocks.3-60.norm.weight x58"."""
    groups: dict[Hashable, list[tuple[str, Item]]] = {}
    for item in items:
        prefix, number, suffix = re.fullmatch(r"(?:(.*?\.)??(\d+)(?=\.|$))?(.*)", path(item)).groups("")  # type: ignore[union-attr]
        groups.setdefault((prefix, suffix, key(item)), []).append((number, item))
    result = []
    for (prefix, suffix, _), members in groups.items():  # type: ignore[misc]
        numbers = [int(number) for number, _ in members if number]
        count = f" x{len(members)}" if len(members) > 1 else ""
        result.append((f"{prefix}{ranges(numbers, ',')}{suffix}{count}", [item for _, item in members]))
    return result
