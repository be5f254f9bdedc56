"""Rules that map logical names of dims to mesh axes: the table, and the axes that shard a tensor on a mesh."""

import math
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from maxmoe.checks.fields import nearest
from maxmoe.checks.yaml_file import load_yaml
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import Axes, PartitionSpec, axis_tuple

PRESETS = Path(__file__).parent / "presets"


class LogicalRules(tuple[tuple[str, tuple[str, ...]], ...]):
    """Ordered table of rules (logical name, mesh axes), applied by `logical_to_mesh_axes`.

    Args:
        rules: pairs of a logical name and None, an axis or a tuple of axes. If two rules have the same axis, the
            earlier rule gets it. A later rule for the same name is a fall-back for the first one.

    Raises:
        ValueError: for an entry that is not such a pair, and for a rule that repeats an axis.

    Source: `flax.linen.logical_axis_rules`.
    """

    __slots__ = ()

    def __new__(cls, rules: Iterable[tuple[str, Axes]] = ()) -> "LogicalRules":
        """Check every rule."""
        return super().__new__(cls, (_checked(rule, f"rule {number}") for number, rule in enumerate(rules)))

    def __repr__(self) -> str:
        return f"LogicalRules({list(self)!r})"

    @property
    def names(self) -> frozenset[str]:
        """The logical names that have a rule."""
        return frozenset(name for name, _ in self)

    @classmethod
    def load(cls, source: "str | Path | LogicalRules") -> "LogicalRules":
        """Load the rules of a preset or of a file.

        A file is a YAML list with one rule per entry, ``- name: [axis, ...]``, in UTF-8.

        Args:
            source: name of a preset, or path of a file: a `Path`, or a string that ends in .yaml or .yml. Rules are
                returned unchanged.

        Raises:
            ValueError: for an unknown preset, with the names of all presets; for a file of another form, with the
                number of the line or of the rule, counted from 0.
        """
        if isinstance(source, LogicalRules):
            return source
        if not isinstance(source, str | Path):
            raise ValueError(f"rules must be LogicalRules, a preset or a path, got {reprlib.repr(source)}")
        if isinstance(source, Path) or source.endswith((".yaml", ".yml")):
            return load_yaml(Path(source), _rules)
        if source not in preset_names():
            known = ", ".join(preset_names())
            raise ValueError(f"there is no preset {source!r}, only {known}; a path ends in .yaml or .yml")
        return _preset(source)

    def override(self, rules: Iterable[tuple[str, Axes]]) -> "LogicalRules":
        """Return a table in which `rules` replace all rules of the same names; they come last, in their own order."""
        new = LogicalRules(rules)
        return LogicalRules([*(rule for rule in self if rule[0] not in new.names), *new])


@cache
def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, in alphabetical order."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.yaml")))


@cache
def _preset(name: str) -> LogicalRules:
    """Load a preset; its file is parsed once per process."""
    return load_yaml(PRESETS / f"{name}.yaml", _rules)


def _checked(rule: object, owner: str) -> tuple[str, tuple[str, ...]]:
    if not isinstance(rule, list | tuple) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
        raise ValueError(f"{owner} must be a logical name and its axes, got {reprlib.repr(rule)}")
    return rule[0], axis_tuple(rule[1], f"{owner}, {reprlib.repr(rule[0])},")


def _rules(entries: Any) -> LogicalRules:
    """Make rules of the contents of a file."""
    if not isinstance(entries, list):
        raise ValueError(f"rules must be a list like '- exp: [expert]', got {reprlib.repr(entries)}")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or len(entry) != 1:
            raise ValueError(f"rule {number} must be like '- exp: [expert]', got {reprlib.repr(entry)}")
    return LogicalRules(pair for entry in entries for pair in entry.items())


class DroppedAxis(NamedTuple):
    """A mesh axis of a spec over which the tensor is not sharded.

    Args:
        dim: index of the dim that the spec shards over the axis.
        reason: why the axis was dropped.
    """

    axis: str
    dim: int
    reason: str


class Resolution(NamedTuple):
    """Result of `resolve`.

    Args:
        spec: axes that shard each dim; all are on the mesh and larger than one.
        dropped: axes that were removed from the spec.
    """

    spec: PartitionSpec
    dropped: tuple[DroppedAxis, ...]


def logical_to_mesh_axes(names: Sequence[str | None], rules: LogicalRules, *, strict: bool = False) -> PartitionSpec:
    """Map the logical name of each dim to mesh axes.

        for (name, axes) in rules, in order:
            spec[dim of name] = axes, unless that dim has its axes already or one of `axes` is taken

    A rule gives all of its axes or none. A rule without axes applies as well: later rules for its name do not. Dims
    without a rule are not sharded. The sizes of axes and dims are not considered here but in `resolve`.

    Args:
        names: logical name of each dim, None for a dim that is never sharded.
        rules: rules to apply.
        strict: raise for a name without a rule; otherwise warn and leave its dim unsharded.

    Returns:
        Partition spec with one entry per dim.

    Raises:
        ValueError: for a repeated name; if strict, for a name without a rule, with the most similar names of rules.

    Source: `flax.linen.logical_to_mesh_axes`.
    """
    spec = mesh_axes(names, rules)
    for message in unknown_names(names, rules):
        if strict:
            raise ValueError(message)
        warnings.warn(f"{message}; its dim is not sharded", stacklevel=2)
    return spec


def mesh_axes(names: Sequence[str | None], rules: LogicalRules) -> PartitionSpec:
    """Compute `logical_to_mesh_axes` without a warning."""
    dims: dict[str, int] = {}
    for dim, name in enumerate(names):
        if name is not None and dims.setdefault(name, dim) != dim:
            raise ValueError(f"dims {dims[name]} and {dim} have the same logical name {name!r}: {tuple(names)}")
    spec: dict[str | None, tuple[str, ...]] = {}
    taken: set[str] = set()
    for logical, axes in rules:
        if logical in dims and logical not in spec and taken.isdisjoint(axes):
            spec[logical] = axes
            taken.update(axes)
    return PartitionSpec(*(spec.get(name) for name in names))


def unknown_names(names: Sequence[str | None], rules: LogicalRules) -> Iterator[str]:
    """Yield a message for each logical name without a rule, with the most similar names of rules."""
    known = dict.fromkeys(name for name, _ in rules)
    for name in names:
        if name is not None and name not in known:
            yield f"no rule for the logical name {name!r} of {tuple(names)}{nearest(name, known)}"


def resolve(
    spec: PartitionSpec, mesh_sizes: Mapping[str, int], shape: Sequence[int], *, strict: bool = False
) -> Resolution:
    """Keep the axes of a spec that can shard a shape evenly on a mesh.

        shape[dim] % prod(sizes of its axes) == 0

    Absent axes and axes of size one are dropped. An axis of a dim is kept if the product of its size and the sizes of
    the axes kept before it divides the length of the dim. DTensor loses rows of a dim that two axes shard unevenly.

    Args:
        spec: partition spec, from `logical_to_mesh_axes` or written by hand.
        mesh_sizes: size of each mesh axis.
        shape: shape of the global tensor.
        strict: raise for a dim that its axes do not divide; otherwise drop axes.

    Returns:
        Spec of the axes that were kept, and the dropped axes with dim and reason.

    Raises:
        ValueError: if spec and shape differ in length; if strict, for a dim that does not divide.

    Source: https://github.com/pytorch/pytorch/issues/194457
    """
    if len(spec) != len(shape):
        raise ValueError(f"{spec!r} has {len(spec)} dims, the shape {tuple(shape)} has {len(shape)}")
    axes_of: list[list[str]] = [[] for _ in shape]
    dropped: list[DroppedAxis] = []
    for dim, axes in enumerate(spec):
        for axis in axes:
            sizes = [mesh_sizes.get(name, 1) for name in (*axes_of[dim], axis)]
            if axis not in mesh_sizes:
                dropped.append(DroppedAxis(axis, dim, "the mesh has no such axis"))
            elif sizes[-1] == 1:
                dropped.append(DroppedAxis(axis, dim, "its size is 1"))
            elif shape[dim] % math.prod(sizes) == 0:
                axes_of[dim].append(axis)
            else:
                reason = f"{shape[dim]} is not divisible by {' * '.join(map(str, sizes))}"
                if strict:
                    raise ValueError(
                        f"axis {axis!r} of {spec!r} cannot shard dim {dim} of the shape {tuple(shape)}: {reason}"
                    )
                dropped.append(DroppedAxis(axis, dim, reason))
    return Resolution(PartitionSpec(*axes_of), tuple(dropped))


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
    of_rules = _axes_of(rules)
    for axis in mesh.axes:
        if axis not in of_rules:
            raise ValueError(
                f"no rule has the axis {axis!r} of {mesh}{nearest(axis, of_rules)}; choose axes of the rules, other "
                "rules, or allow_unused=True"
            )
    of_presets = _rules_of_presets()
    own_names = [name for name, _ in rules if name not in of_presets.names]
    known_names = dict.fromkeys([*(name for name, _ in of_presets), *declared]) if own_names else {}
    for name in own_names:
        if name not in known_names:
            hint = nearest(name, known_names)
            raise ValueError(f"the rules have the name {name!r}, which no module declares and no preset has{hint}")
    known_axes = [*mesh.sizes, *_axes_of(of_presets)]
    for axis in of_rules:
        if axis not in known_axes:
            hint = nearest(axis, known_axes)
            raise ValueError(f"the rules have the axis {axis!r}, which neither {mesh} nor a preset has{hint}")


def _axes_of(rules: LogicalRules) -> list[str]:
    """Return the mesh axes of a table, in its order."""
    return [*dict.fromkeys(axis for _, axes in rules for axis in axes)]


@cache
def _rules_of_presets() -> LogicalRules:
    """Return the rules of all presets."""
    return LogicalRules(rule for preset in preset_names() for rule in LogicalRules.load(preset))
