"""A model with one block of each kind, so that repeated blocks are planned once."""

from collections import Counter
from collections.abc import Hashable, Mapping
from functools import cache, cached_property
from typing import NamedTuple

from torch import nn

from maxmoe.declaration import declaration_of
from maxmoe.pipelining.stage_modules import StagePart, pipeline_parts, stage_module, stage_parts


class StageKind(NamedTuple):
    """Stages with the same parts of a model.

    Attributes:
        blocks: number of blocks of each kind.
        is_first: whether they have the first part.
        is_last: whether they have the last part.
        rank: rank of the first of them along the axis `stage`.
        number: number of them.
    """

    blocks: Mapping[str, int]
    is_first: bool
    is_last: bool
    rank: int
    number: int


class ModelParts:
    """Parts of a model: its kinds of blocks, and the rest of it.

    Args:
        model: model; if it does not declare its `pipeline_parts`, all of it is the rest.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.has_blocks = declaration_of(model).pipeline_parts is not None
        self._kind_of: dict[str, str] = {}
        kinds: dict[Hashable, str] = {}
        if self.has_blocks:
            path = pipeline_parts(model).blocks
            for name, block in model.get_submodule(path).named_children():
                self._kind_of[name] = kinds.setdefault(_signature(block), name)
        self._kinds = tuple(dict.fromkeys(self._kind_of.values()))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Path of the first block of each kind."""
        return tuple(self._path(kind) for kind in self._kinds)

    @property
    def can_be_cut(self) -> bool:
        """Whether the model declares what pipeline stages need: its parts, and what one stage sends to the next."""
        return self.has_blocks and declaration_of(self.model).residual_stream is not None

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._kind_of)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Number of blocks of each kind, by the path of the first one."""
        return {self._path(kind): count for kind, count in Counter(self._kind_of.values()).items()}

    @cached_property
    def whole(self) -> nn.Module:
        """The model with one block of each kind."""
        return stage_module(self.model, StagePart(self._kinds, True, True)) if self.has_blocks else self.model

    @cached_property
    def first(self) -> nn.Module:
        """One block of each kind and the first part, without the last part."""
        return stage_module(self.model, StagePart(self._kinds, True, False))

    @cached_property
    def last(self) -> nn.Module:
        """The last part, without blocks."""
        return stage_module(self.model, StagePart((), False, True))

    @cache  # noqa: B019, lives as long as a search
    def stages(self, num_stages: int) -> list[StageKind]:
        """Return the kinds of stages, as `maxmoe.pipeline` cuts the model."""
        kinds: dict[Hashable, StageKind] = {}
        for rank, part in enumerate(stage_parts(self.model, num_stages)):
            counts = Counter(self._path(self._kind_of[name]) for name in part.blocks)
            key = frozenset(counts.items()), part.is_first, part.is_last
            kind = kinds.setdefault(key, StageKind(counts, part.is_first, part.is_last, rank, 0))
            kinds[key] = kind._replace(number=kind.number + 1)
        return list(kinds.values())

    def _path(self, kind: str) -> str:
        return f"{pipeline_parts(self.model).blocks}.{kind}"


def _signature(block: nn.Module) -> Hashable:
    """Return what two blocks have in common if they have the same plan."""
    modules = tuple((path, type(module), module.extra_repr()) for path, module in block.named_modules())
    configs = tuple(repr(getattr(module, "config", None)) for module in block.modules())
    parameters = tuple(
        (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in block.named_parameters()
    )
    return modules, configs, parameters
