"""A model with one block of each kind, so that repeated blocks are planned once."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from torch import nn

from maxmoe.declaration import declaration_of
from maxmoe.parallel.plan.plan import ModulePlan, Plan, enclosing
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.pipelining.stage_modules import StagePart, pipeline_parts, stage_module, stage_parts
from maxmoe.planning.memory import parameter_dtype
from maxmoe.planning.planned_batch import PlannedBatch, message_bytes
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.rules import LogicalRules

FIRST, LAST = "first", "last"  # names of the parts before and after the blocks


class StageKind(NamedTuple):
    """Stages with the same parts of a model: how often they have each part, the rank of the first one, their number."""

    parts: Counter[str]
    rank: int
    number: int


class ModelParts:
    """Kinds of blocks of a model, by the path of the first block of each, and the parts before and after the blocks.

    Args:
        model: model; if it does not declare its `pipeline_parts`, all of it is the first part.

    Attributes:
        reduced: the model with one block of each kind.
        on_one_rank: plan of the whole model on one rank.
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
            ends = StagePart(names, True, False), StagePart((), False, True)
            self._first, self._last = (stage_module(self.reduced, part) for part in ends)
        self.on_one_rank = make_plan(model, Mesh.planned({}), LogicalRules(), allow_unused=True)

    @property
    def num_blocks(self) -> int:
        """Number of blocks; 0 for a model that cannot be cut into stages."""
        return len(self._kind_of)

    @cache  # noqa: B019, lives as long as a search
    def sequence_bytes(self, length: int) -> int:
        """Return the bytes of the hidden states of a sequence, which a stage passes to the next one."""
        batch = PlannedBatch(self.on_one_rank, 1, length, parameter_dtype(self.on_one_rank))
        try:
            return message_bytes(self.model, batch)
        except Exception as error:
            raise ValueError(f"the hidden states between stages are not known: {error}") from error

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
        modules: dict[str, dict[str, ModulePlan]] = {}
        for kind in self._kind_of.values():  # with empty plans of the modules around it
            modules[kind] = {outer: ModulePlan(module=nn.Identity(), parameters={}) for outer in enclosing(kind)[1:]}
        modules[FIRST] = {}
        for path, module in whole.items():
            part = next((kind for kind in modules if f"{path}.".startswith(f"{kind}.")), FIRST)
            modules[part][path] = module
        parts = {part: replace(whole, modules=of_part) for part, of_part in modules.items()}
        return whole, parts | ({LAST: make(self._last)} if has_stages else {})


def _signature(block: nn.Module) -> Hashable:
    """Return what two blocks have in common if they have the same plan."""
    modules = tuple((path, type(module), module.extra_repr()) for path, module in block.named_modules())
    configs = tuple(repr(getattr(module, "config", None)) for module in block.modules())
    parameters = tuple(
        (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in block.named_parameters()
    )
    return modules, configs, parameters
