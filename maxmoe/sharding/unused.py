"""Names in a mesh and in its rules that have no effect: most of them are typos."""

from collections.abc import Iterable
from functools import cache

from maxmoe.config import nearest
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.rules import PRESETS, LogicalRules


def check_used(mesh: Mesh, rules: LogicalRules, declared: Iterable[str] = ()) -> None:
    """Refuse names without effect, and say which ones are near.

    They are: a mesh axis larger than one that no rule has; a rule whose name neither a module declares nor a preset
    has; an axis of a rule that neither the mesh nor a preset has. An axis of one's own must be on the mesh, with size
    one where it is not needed; axes of the presets may be absent.

    Args:
        mesh: planned or not.
        rules: the table.
        declared: the logical names of the modules, read only for a table with names of its own.

    Raises:
        ValueError: for the first such name.
    """
    of_rules = {axis: None for _, axes in rules for axis in axes}
    of_presets = {axis: None for _, axes in _preset_rules() for axis in axes}
    for axis in mesh.axes:
        if axis not in of_rules:
            raise ValueError(
                f"no rule has the axis {axis!r} of {mesh}{nearest(axis, of_rules)}; choose axes of the rules, other "
                "rules, or allow_unused=True"
            )
    own_names = {name: None for name, _ in rules if name not in _preset_rules().names}
    known_names = [*_preset_rules().names, *declared] if own_names else []
    for name in own_names:
        if name not in known_names:
            hint = nearest(name, known_names)
            raise ValueError(f"the rules have the name {name!r}, which no module declares and no preset has{hint}")
    for axis in of_rules:
        if axis not in of_presets and axis not in mesh.sizes:
            hint = nearest(axis, [*mesh.sizes, *of_presets])
            raise ValueError(f"the rules have the axis {axis!r}, which neither {mesh} nor a preset has{hint}")


@cache
def _preset_rules() -> LogicalRules:
    """Return the rules of all presets."""
    return LogicalRules(rule for path in sorted(PRESETS.glob("*.yaml")) for rule in LogicalRules.load(path.stem))
