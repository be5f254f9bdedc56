"""A model with one block of each kind, so that repeated blocks are planned once."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from torch import nn

from maxmoe.declaration import declaration_of
from maxmoe.parallel.plan.plan import ModulePlan, Plan, enclosing
from maxmoe.pipelining.stage_modules import StagePart, pipeline_parts, stage_module, stage_parts

FIRST, LAST = "first", "last"  # names of the parts before and after the blocks


class StageKind(NamedTuple):
    """Stages with the same parts of a model.

    Attributes:
        parts: number of parts of each name.
        rank: rank of the first such stage along the axis `stage`.
        number: number of stages of this kind.
    """

    parts: Mapping[str, int]
    rank: int
    number: int


class ModelParts:
    """Kinds of blocks of a model, by the path of the first block of each, and the parts before and after the blocks.

    Args:
        model: model; if it does not declare its `pipeline_parts`, all of it is the first part.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.reduced = model, model
        self._kind_of: dict[str, str] = {}  # by name of the block
        if declaration_of(model).pipeline_parts is not None:
            kinds: dict[Hashable, str] = {}
            blocks = pipeline_parts(model).blocks
            for name, block in model.get_submodule(blocks).named_children():
                self._kind_of[name] = f"{blocks}.{kinds.setdefault(_signature(block), name)}"
            names = tuple(kinds.values())
            self.reduced = stage_module(model, StagePart(names, True, True))
        if self.can_be_cut:
            ends = StagePart(names, True, False), StagePart((), False, True)
            self._first, self._last = (stage_module(self.reduced, part) for part in ends)

    @property
    def can_be_cut(self) -> bool:
        """Whether the model declares what pipeline stages need: its parts, and what one stage sends to the next."""
        return bool(self._kind_of) and declaration_of(self.model).residual_stream is not None

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._kind_of)

    @cache  # noqa: B019, lives as long as a search
    def stages(self, num_stages: int) -> list[StageKind]:
        """Return the kinds of stages, as `maxmoe.pipeline` cuts the model; without stages, one of all parts."""
        if num_stages == 1:
            return [StageKind(Counter([FIRST, *self._kind_of.values()]), 0, 1)]
        kinds: dict[Hashable, StageKind] = {}
        for rank, part in enumerate(stage_parts(self.model, num_stages)):
            blocks = [self._kind_of[name] for name in part.blocks]
            counts = Counter([FIRST] * part.is_first + blocks + [LAST] * part.is_last)
            kind = kinds.setdefault(frozenset(counts.items()), StageKind(counts, rank, 0))
            kinds[frozenset(counts.items())] = kind._replace(number=kind.number + 1)
        return list(kinds.values())

    def plans(self, make: Callable[[nn.Module], Plan], *, has_stages: bool) -> tuple[Plan, dict[str, Plan]]:
        """Return the plan of the model with one block of each kind, and the plan of each part of `stages`.

        With stages, the first plan lacks the last part of the model, which is on other ranks.
        """
        whole = make(self._first if has_stages else self.reduced)
        kinds = tuple(dict.fromkeys(self._kind_of.values()))
        parts = {kind: _inside(whole, kind) for kind in kinds} | {FIRST: _outside(whole, kinds)}
        return whole, parts | ({LAST: make(self._last)} if has_stages else {})


def _inside(plan: Plan, path: str) -> Plan:
    """Return the plan of the module at a path, and of the modules in it."""
    inside = {name: module for name, module in plan.items() if _is_in(name, path)}
    around = {outer: ModulePlan(module=nn.Identity(), parameters={}) for outer in enclosing(path)[1:]}
    return replace(plan, modules=around | inside)


def _outside(plan: Plan, paths: tuple[str, ...]) -> Plan:
    """Return the plan without the modules at some paths, and without the modules in them."""
    kept = {name: module for name, module in plan.items() if not any(_is_in(name, path) for path in paths)}
    return replace(plan, modules=kept)


def _is_in(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _signature(block: nn.Module) -> Hashable:
    """Return what two blocks have in common if they have the same plan."""
    modules = tuple((path, type(module), module.extra_repr()) for path, module in block.named_modules())
    configs = tuple(repr(getattr(module, "config", None)) for module in block.modules())
    parameters = tuple(
        (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in block.named_parameters()
    )
    return modules, configs, parameters
