"""Sharding of every parameter and dispatch of every Mixture-of-Experts layer, with the reasons."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.parallel.parallelize import undeclared_modules
from maxmoe.parallel.plan.dispatch_plan import Dispatch, DispatchPlan
from maxmoe.parallel.plan.parameter_sharding import ParameterSharding
from maxmoe.parallel.plan.plan import ParameterPlan, Plan
from maxmoe.pipelining.pipeline_plan import PipelinePlan, pipeline_options, plan_model
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.rules import LogicalRules
from maxmoe.text_table import listed, ranges, readable_bytes, report

# A replicated parameter is large if it takes at least this share of the bytes of a rank.
LARGE_SHARE = 0.01

Item = TypeVar("Item")


@dataclass(frozen=True)
class Explanation:
    """Result of `explain`. As a string, tables as wide as the terminal, with repeated layers in one row.

    Args:
        mesh: mesh of the plan.
        rules: rules of the plan.
        plan: plan of the whole model, on the ranks of a stage if the model is cut into stages.
        pipeline: plan of the pipeline stages; None if the model is not cut into stages.
    """

    mesh: Mesh
    rules: LogicalRules
    plan: Plan
    pipeline: PipelinePlan | None = None

    @cached_property
    def parameters(self) -> tuple[ParameterPlan, ...]:
        """Parameters in the order of `named_parameters`, shared ones once."""
        return tuple(self.plan.parameters[name] for name, _ in self.plan.model.named_parameters())

    @property
    def dispatch(self) -> dict[str, DispatchPlan]:
        """Strategy, reason and axes of each Mixture-of-Experts layer, by its path."""
        return {path: dispatch for path, (_, dispatch) in self.plan.layers.items()}

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters, over all ranks; weights, not bytes, of quantized experts."""
        return sum(parameter.parameter.num_weights for parameter in self.parameters)

    @cached_property
    def local_bytes(self) -> int:
        """Bytes of the parameters per rank, equal on all ranks; with pipeline stages, the sum over the stages."""
        return sum(parameter.local_bytes for parameter in self.parameters)

    @cached_property
    def _groups(self) -> list[tuple[str, list[ParameterPlan]]]:
        return group_repeated(self.parameters, lambda parameter: parameter.name, lambda parameter: parameter.parameter)

    @property
    def _replicated(self) -> Iterator[tuple[str, ParameterSharding, int]]:
        """Yield the parameters that every rank holds whole, repeated ones once, with their bytes."""
        for label, group in self._groups:
            if group[0].local_shape == group[0].parameter.shape:
                yield label, group[0].parameter, sum(parameter.local_bytes for parameter in group)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Parts of the plan that may be unintended."""
        large = [
            f"{label} is replicated on every rank: {readable_bytes(local_bytes)}, "
            f"{local_bytes / self.local_bytes:.0%} of the parameters of a rank"
            for label, _, local_bytes in self._replicated
            if self.mesh.num_ranks > 1 and local_bytes >= LARGE_SHARE * self.local_bytes
        ]
        labels = [label for label, group in self._groups if group[0].parameter.names is None]
        unnamed = [f"parameters without logical names are not sharded: {listed(labels)}"] if labels else []
        names = dict.fromkeys(name for parameter in self.parameters for name in parameter.parameter.names or ())
        unknown = [
            f"no rule for the logical name {name!r}: its dims are not sharded"
            for name in names
            if name not in (None, *self.rules.names)
        ]
        of_tokens = [
            f"the rule {name!r} has no effect over {' '.join(axes)}: that shards the tokens, and every rank computes "
            "the whole dim for its own"
            for name, axes in self.plan.axes_of_tokens.items()
        ]
        return (*large, *unnamed, *unknown, *of_tokens, *filter(None, [undeclared_modules(self.plan)]))

    def __str__(self) -> str:
        rows = [("parameter", "logical names and their rules", "on the mesh", "local shape", "bytes per rank")]
        for label, (first, *others) in self._groups:
            axes = " | ".join(" ".join(axes) or "-" for axes in first.parameter.sharding.spec)
            num_bytes = readable_bytes(first.local_bytes * (1 + len(others)))
            rows.append((label, self._rules_text(first.parameter), axes, str(list(first.local_shape)), num_bytes))
        total = f"all {self.num_parameters:,} parameters{', over all stages' if self.pipeline else ''}"
        rows.append((total, "", "", "", readable_bytes(self.local_bytes)))
        stages = [] if self.pipeline is None else [_stage_rows(self.pipeline), _schedule_text(self.pipeline)]
        layers = [_dispatch_rows(self.dispatch)] if self.dispatch else []
        return report([*self._first_lines(), rows, "\n".join(self._remarks()), *stages, *layers])

    def _first_lines(self) -> Iterator[str]:
        """Yield what a plan on many ranks must not hide: the bytes that all ranks hold because dims do not divide."""
        whole = [each for each in self._replicated if each[1].indivisible]
        total = sum(local_bytes for *_, local_bytes in whole)
        if total >= LARGE_SHARE * self.local_bytes and total:
            axes = dict.fromkeys(drop.axis for _, parameter, _ in whole for drop in parameter.indivisible)
            labels = listed([label for label, *_ in whole])
            sizes = ", ".join(f"{axis}={self.mesh.size(axis)}" for axis in axes)
            yield (
                f"Every rank holds {readable_bytes(total)} of {readable_bytes(self.local_bytes)} of parameters whole, "
                f"because {sizes} does not divide their dims: {labels}."
            )

    def _rules_text(self, parameter: ParameterSharding) -> str:
        """Write the axes of the rule of each dim, or why no rule applies."""
        texts = []
        for name, axes in zip(parameter.names or (), parameter.requested, strict=False):
            without = "its axes are taken" if name in self.rules.names else "no rule"
            applied = (" ".join(axes) or "-") if (name, axes) in self.rules else without
            texts.append("-" if name is None else f"{name}: {applied}")
        return " | ".join(texts) or "no names"

    def _remarks(self) -> Iterator[str]:
        absent = {drop.axis: None for parameter in self.parameters for drop in parameter.parameter.dropped}
        absent_axes = [axis for axis in absent if self.mesh.size(axis) == 1]
        if absent_axes:
            yield f"Axes of the rules that this mesh lacks, or has with size 1: {', '.join(absent_axes)}."
        for label, group in self._groups:
            for axis, dim, reason in group[0].parameter.indivisible:
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
        allow_unused: accept rules and mesh axes without effect.
        schedule: schedule of the pipeline stages, as for `maxmoe.pipeline`.
        num_micro_batches: number of micro-batches of a step; None to explain the whole model, without pipeline stages,
            also on a mesh with an axis `stage`.
        blocks_per_stage: number of blocks of each stage, as for `maxmoe.pipeline`.
        stages_per_rank: number of stages of each rank, as for `maxmoe.pipeline`.

    Raises:
        ValueError: as `parameter_shardings`, `plan_dispatch` and `maxmoe.pipeline`.
    """
    module, rules = planned_copy(module), LogicalRules.load(rules)
    options = pipeline_options(schedule, num_micro_batches, blocks_per_stage, stages_per_rank)
    plan, pipeline = plan_model(
        module, mesh, rules, options, dispatch=dispatch, num_chunks=num_chunks, allow_unused=allow_unused
    )
    return Explanation(mesh, rules, plan, pipeline)


def _dispatch_rows(layers: Mapping[str, DispatchPlan]) -> list[tuple[str, ...]]:
    """Return a table of strategies and axes, with one row for repeated layers."""
    rows: list[tuple[str, ...]] = [("MoE layer", "dispatch", "reason", "axes", "experts per rank")]
    for label, ((_, plan), *_) in group_repeated(layers.items(), lambda layer: layer[0], lambda layer: layer[1]):
        parts = (
            ("tokens sent over", plan.token_axes),
            ("tokens replicated over", plan.replicated_axes),
            ("tensor parallelism over", plan.tensor_parallel_axes),
        )
        axes = " | ".join(f"{role} {' '.join(axes)}" for role, axes in parts if axes) or "-"
        experts = f"{plan.num_local_experts} of {plan.config.num_experts}"
        rows.append((label or "the layer", plan.strategy, plan.reason, axes, experts))
    return rows


def _stage_rows(plan: PipelinePlan) -> list[tuple[str, ...]]:
    """Return a table of the stages."""
    rows: list[tuple[str, ...]] = [("stage", "rank", "parts", "parameters", "bytes", "work", "in flight", "idle")]
    for stage in plan.stages:
        stored = sum(parameter.local_bytes for parameter in stage.plan.parameters.values())
        numbers = f"{stage.num_parameters:,}", readable_bytes(stored), f"{stage.work:.2f}"
        times = str(plan.max_in_flight(stage.rank)[stage.index]), f"{plan.timeline.idle(stage.rank):.1%}"
        rows.append((str(stage.index), str(stage.rank), stage.parts, *numbers, *times))
    return rows


def _schedule_text(plan: PipelinePlan) -> str:
    """Say how long ranks wait, and which is the slowest."""
    options, stages = plan.options, plan.stages_of(plan.slowest)
    names = f"stage{'s' * (len(stages) > 1)} {' and '.join(str(stage.index) for stage in stages)}"
    return (
        f"Schedule {options.schedule}, {options.num_micro_batches} micro-batches: a rank is idle for "
        f"{plan.timeline.bubble:.1%} of a step on average (the bubble), {plan.smallest_bubble:.1%} if all stages had "
        "the same work. Messages and collectives are taken to need no time.\n"
        f"Most work: {names}, {plan.work(plan.slowest):.2f} times the mean of the ranks."
    )


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
        result.append((f"{prefix}{ranges(numbers)}{suffix}{count}", [item for _, item in members]))
    return result
