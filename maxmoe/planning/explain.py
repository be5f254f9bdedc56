"""Sharding of every parameter and dispatch of every Mixture-of-Experts layer, with the reasons."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.parallel.parallelize import undeclared_modules
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.parameter_sharding import ParameterSharding
from maxmoe.planning.explained_dispatch import ExplainedDispatch, dispatch_tables, explain_dispatch
from maxmoe.planning.pipeline_estimate import stage_table
from maxmoe.planning.pipeline_plan import PipelinePlan, pipeline_options, plan_model
from maxmoe.planning.repeated_layers import group_repeated
from maxmoe.planning.saved_tensors import micro_batch_sizes
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.rules import DroppedAxis, LogicalRules
from maxmoe.text_table import paragraph, readable_bytes, terminal_width, text_table

# A replicated parameter is large if it takes at least this share of the bytes of a rank.
LARGE_SHARE = 0.01
# Number of parameters that a sentence lists.
LISTED = 3


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
        unnamed = [
            f"{label} has no logical names: it is not sharded"
            for label, group in self._groups
            if group[0].parameter.names is None
        ]
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
            labels = [label for label, _ in groups[:LISTED]]
            labels += [f"and {len(groups) - LISTED} more"] if len(groups) > LISTED else []
            sizes = ", ".join(f"{axis}={self.mesh.size(axis)}" for axis in axes)
            yield (
                f"Every rank holds {readable_bytes(total)} of {readable_bytes(self.local_bytes)} of parameters whole, "
                f"because {sizes} does not divide their dims: {', '.join(labels)}."
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


def _applied_rules(parameter: ParameterSharding, rules: LogicalRules) -> tuple[tuple[str, ...] | None, ...]:
    """Return for each dim the axes of its rule, as `parameter.requested`, but None if no rule applies."""
    names = parameter.names or (None,) * len(parameter.shape)
    return tuple(axes if (name, axes) in rules else None for name, axes in zip(names, parameter.requested, strict=True))
