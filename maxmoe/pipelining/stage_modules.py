"""Cuts a model into the modules of its pipeline stages."""

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from torch import nn

from maxmoe._torch.copies import shallow_copy
from maxmoe.declaration import Absent, PipelineParts, declaration_of
from maxmoe.nn import MoELayer
from maxmoe.quantization import weights


class StagePart(NamedTuple):
    """The part of a model that a stage has: names in the list of blocks, and what comes before and after the blocks."""

    blocks: tuple[str, ...]
    is_first: bool
    is_last: bool


def stage_parts(model: nn.Module, num_stages: int, blocks_per_stage: Sequence[int] | None = None) -> list[StagePart]:
    """Cut a model into stages, of given numbers of blocks or such that the largest cost is as small as possible."""
    parts = pipeline_parts(model)
    blocks = model.get_submodule(parts.blocks)
    names = _names(blocks)
    if len(names) < num_stages:
        raise ValueError(f"the model must have a block for each of the {num_stages} stages, got {len(names)} blocks")
    if blocks_per_stage is None:
        blocks_per_stage = partition_blocks(_costs(model, parts), num_stages)
    counts = list(blocks_per_stage)
    if len(counts) != num_stages or sum(counts) != len(names) or min(counts) < 1:
        raise ValueError(
            f"blocks_per_stage must be {num_stages} positive numbers with the sum {len(names)}, got {counts}"
        )
    ends = [*itertools.accumulate(counts, initial=0)]
    stages = [
        StagePart(tuple(names[begin:end]), is_first=begin == 0, is_last=end == len(names))
        for begin, end in itertools.pairwise(ends)
    ]
    _check_parameters(model, parts, stages)
    return stages


def pipeline_parts(model: nn.Module) -> PipelineParts:
    """Return the declared parts of a model; raise a ValueError if it declares none, or does not have them."""
    parts = declaration_of(model).pipeline_parts
    if parts is None:
        raise ValueError(
            f"{type(model).__name__} must declare its pipeline_parts, see maxmoe.parallel.Declaration: the modules "
            "before its blocks, its list of blocks, and the modules after them"
        )
    for path in (*parts.first, parts.blocks, *parts.last):
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise ValueError(
                f"the pipeline_parts of {type(model).__name__} have {path!r}, which it does not have"
            ) from None
        if path == parts.blocks and not isinstance(module, nn.ModuleList):
            raise ValueError(
                f"the blocks {path!r} of {type(model).__name__} must be a ModuleList, got {type(module).__name__}"
            )
    return parts


def stage_module(model: nn.Module, part: StagePart) -> nn.Module:
    """Return a module with the parts of a stage, which shares its submodules, and so its parameters, with the model."""
    blocks = shallow_copy(model.get_submodule(pipeline_parts(model).blocks))
    return _with_children(model, {**_replacements(model, blocks, [part]), pipeline_parts(model).blocks: blocks})


def keep_stages(model: nn.Module, stages: Sequence[StagePart]) -> None:
    """Remove all parts of a model that none of the stages has."""
    blocks = model.get_submodule(pipeline_parts(model).blocks)
    for path, absent in _replacements(model, blocks, stages).items():
        model.set_submodule(path, absent)


def _replacements(model: nn.Module, blocks: nn.Module, stages: Sequence[StagePart]) -> dict[str, nn.Module]:
    """Replace the blocks that no stage has in a list, and return the replacements of the first and the last part."""
    parts = pipeline_parts(model)
    kept, names = {name for stage in stages for name in stage.blocks}, _names(blocks)
    for name in names:
        if name not in kept and parts.removes_blocks:
            delattr(blocks, name)
        elif name not in kept:
            setattr(blocks, name, Absent(parts.absent_block_output))
    absent = () if any(stage.is_first for stage in stages) else parts.first
    absent += () if any(stage.is_last for stage in stages) else parts.last
    return {path: Absent() for path in absent}


def copied_modules(model: nn.Module, stage: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return the modules of a model of which the module of a stage has copies, each with its copy."""
    pairs = ((model.get_submodule(path), copy) for path, copy in stage.named_modules())
    return [(module, copy) for module, copy in pairs if module is not copy and not isinstance(copy, Absent)]


def _names(blocks: nn.Module) -> list[str]:
    """Return the names of the blocks in a list; a block may be in it several times."""
    return [str(index) for index in range(len(blocks))]  # type: ignore[arg-type]


def _with_children(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """Copy a module and its descendants on the way to the replaced ones; all other modules are shared."""
    copy = shallow_copy(module)
    below: dict[str, dict[str, nn.Module]] = {}
    for path, child in replaced.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = child
        else:
            setattr(copy, name, child)
    for name, children in below.items():
        setattr(copy, name, _with_children(module.get_submodule(name), children))
    return copy


def _costs(model: nn.Module, parts: PipelineParts) -> list[tuple[float, float]]:
    """Return the shares of the first part, of each block and of the last part in the parameters, and in the work."""
    modules = [
        [model.get_submodule(path) for path in parts.first],
        *([block] for block in model.get_submodule(parts.blocks)),  # type: ignore[attr-defined]
        [model.get_submodule(path) for path in parts.last],
    ]
    sizes = [sum(weight.numel() for module in group for weight in weights(module)) for group in modules]
    work = [sum(map(work_per_token, group)) for group in modules]
    total_size, total_work = max(sum(sizes), 1), max(sum(work), 1.0)
    return [(size / total_size, part / total_work) for size, part in zip(sizes, work, strict=True)]


def partition_blocks(costs: Sequence[tuple[float, float]], num_stages: int) -> list[int]:
    """Cut a list of blocks into stages such that the largest cost of a stage is as small as possible.

    There is one cost for the part before the blocks, one per block, and one for the part after. The cost of a stage is
    the larger one of its two sums.
    """
    sums: list[list[float]] = [[*itertools.accumulate(shares, initial=0.0)] for shares in zip(*costs, strict=True)]

    def cost_of(stage: int, begin: int, end: int) -> float:
        first = begin if stage == 0 else begin + 1
        last = end + 1 if stage < num_stages - 1 else end + 2
        return max(so_far[last] - so_far[first] for so_far in sums)

    @cache
    def best(stage: int, end: int) -> tuple[float, int]:
        """Return the smallest possible largest cost of the stages so far, and where the last of them begins."""
        if stage == 0:
            return cost_of(0, 0, end), 0
        # Of equal ones, the first, so that all ranks find the same.
        return min((max(best(stage - 1, begin)[0], cost_of(stage, begin, end)), begin) for begin in range(stage, end))

    ends = [len(costs) - 2]
    for stage in reversed(range(num_stages)):
        ends.insert(0, best(stage, ends[0])[1])
    return [end - begin for begin, end in itertools.pairwise(ends)]


def work_per_token(module: nn.Module) -> float:
    """Count the multiplications of a token with matrices; a token uses top_k of the routed experts."""
    if isinstance(module, nn.Embedding):
        return 0.0
    own = sum(float(weight.numel()) for weight in weights(module, recurse=False) if weight.dim() > 1)
    work = own + sum(work_per_token(child) for child in module.children())
    if isinstance(module, MoELayer):
        routed = sum(weight.numel() for weight in weights(module.part("experts")) if weight.dim() > 1)
        work -= routed * (1 - module.config.top_k / module.config.num_selectable_experts)
    return work


def _check_parameters(model: nn.Module, parts: PipelineParts, stages: Sequence[StagePart]) -> None:
    """Raise for parameters outside of the parts, or shared between stages."""
    owners: dict[str, set[int]] = {}
    for stage, part in enumerate(stages):
        paths = [*parts.first] * part.is_first + [f"{parts.blocks}.{name}" for name in part.blocks]
        for path in paths + [*parts.last] * part.is_last:
            for name, _ in model.get_submodule(path).named_parameters(path, remove_duplicate=False):
                owners.setdefault(name, set()).add(stage)
    seen: dict[nn.Parameter, tuple[str, set[int]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in owners:
            raise ValueError(
                f"{name} must be in the pipeline_parts of {type(model).__name__}, first, blocks or last: a parameter "
                "that every stage has would get a part of its gradient in each"
            )
        other, stages_of_other = seen.setdefault(parameter, (name, owners[name]))
        if len(owners[name] | stages_of_other) > 1:
            numbers = ", ".join(map(str, sorted(owners[name] | stages_of_other)))
            shared = name if other == name else f"{other} and {name}"
            raise ValueError(
                f"{shared} must be one parameter on one stage, got stages {numbers}: tie no weights across stages"
            )
