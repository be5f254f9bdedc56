"""Check for names in a mesh and its rules that have no effect, most of which are typos."""

from collections.abc import Iterable
from functools import cache

from maxmoe.field_checks import nearest
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.rules import LogicalRules, preset_names


def check_used(mesh: Mesh, rules: LogicalRules, declared: Iterable[str] = ()) -> None:
    """Raise for names of the mesh and the rules that have no effect.

    A name has no effect if it is a mesh axis larger than one that no rule has, the name of a rule that neither a module
    declares nor a preset has, or an axis of a rule that neither the mesh nor a preset has. Axes of the presets may be
    absent from the mesh; any other axis of a rule must be on it, with size one where it is not used.

    Args:
        mesh: mesh to check; may be planned.
        rules: rules to check.
        declared: logical names that the modules declare; read only if the rules have names that no preset has.

    Raises:
        ValueError: for the first name without effect, with the most similar known names.
    """
    of_rules = {axis: None for _, axes in rules for axis in axes}
    preset_names, of_presets = _preset_names_and_axes()
    for axis in mesh.axes:
        if axis not in of_rules:
            raise ValueError(
                f"no rule has the axis {axis!r} of {mesh}{nearest(axis, of_rules)}; choose axes of the rules, other "
                "rules, or allow_unused=True"
            )
    own_names = {name: None for name, _ in rules if name not in preset_names}
    known_names = [*preset_names, *declared] if own_names else []
    for name in own_names:
        if name not in known_names:
            hint = nearest(name, known_names)
            raise ValueError(f"the rules have the name {name!r}, which no module declares and no preset has{hint}")
    for axis in of_rules:
        if axis not in of_presets and axis not in mesh.sizes:
            hint = nearest(axis, [*mesh.sizes, *of_presets])
            raise ValueError(f"the rules have the axis {axis!r}, which neither {mesh} nor a preset has{hint}")


@cache
def _preset_names_and_axes() -> tuple[dict[str, None], dict[str, None]]:
    """Return the logical names and the mesh axes of all presets, each in the order of the presets."""
    rules = [rule for preset in preset_names() for rule in LogicalRules.load(preset)]
    return {name: None for name, _ in rules}, {axis: None for _, axes in rules for axis in axes}
