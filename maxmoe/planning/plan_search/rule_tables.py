"""Tables of rules that shard a model differently."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from maxmoe.declaration import TOKEN_DIMS
from maxmoe.parallel.dispatch_plan import EXPERT_TOKEN_DIMS
from maxmoe.parallel.parameter_sharding import logical_names
from maxmoe.sharding.partition_spec import PartitionSpec
from maxmoe.sharding.resolve import logical_to_mesh_axes
from maxmoe.sharding.rules import PRESETS, LogicalRules


@dataclass(frozen=True)
class Table:
    """Rules with their name."""

    name: str
    rules: LogicalRules


def tables(rules: Sequence[str] | None) -> list[Table]:
    """Load presets or files by name; None for all presets."""
    names = sorted(path.stem for path in PRESETS.glob("*.yaml")) if rules is None else rules
    return [Table(name, LogicalRules.load(name)) for name in names]


class Effects:
    """Recognizes rules with the same effect on the meshes that have some axes only.

    Args:
        model: model that is sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = sorted(set(logical_names(model).values()), key=repr)
        self._seen: dict[Hashable, str] = {}

    def same_as(self, table: Table, axes: Sequence[str]) -> str | None:
        """Return the name of an earlier table with the same effect on meshes of `axes`; None for the first one."""
        effect = tuple(axes), tuple(self._effect(table.rules, axes))
        first = self._seen.setdefault(effect, table.name)
        return None if first == table.name else first

    def _effect(self, rules: LogicalRules, axes: Sequence[str]) -> Iterator[Hashable]:
        def present(spec: PartitionSpec) -> Hashable:
            return tuple(tuple(axis for axis in entry if axis in axes) for entry in spec)

        for names in self._names:
            known = [name if name in rules.names else None for name in names]
            yield present(logical_to_mesh_axes(known, rules))
        for names in (TOKEN_DIMS, EXPERT_TOKEN_DIMS):
            known = [name if name in rules.names else None for name in names]
            yield present(logical_to_mesh_axes(known, rules))
        for name, entry in rules:
            if name.startswith("activation_"):
                yield name, tuple(axis for axis in entry if axis in axes)
