"""The table that says which mesh axes shard the dims of each logical name."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from maxmoe.sharding.partition_spec import Axes, axis_tuple

PRESETS = Path(__file__).parent / "presets"


class LogicalRules(tuple[tuple[str, tuple[str, ...]], ...]):
    """An ordered table of rules (logical name, mesh axes); `logical_to_mesh_axes` says how it is read.

    Args:
        rules: pairs of a logical name and None, an axis or a tuple of axes. Where two rules have the same axis the
            earlier one gets it; a repeated name is a fall-back for its first rule.

    Raises:
        ValueError: for anything else than such a pair, and for a rule that has an axis twice.

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
        """Read a preset of the package, or a file of one's own.

        A file is a YAML list with one rule per entry: ``- name: [axis, ...]``.

        Args:
            source: the name of a preset, or the path of a file: a `Path`, or a string that ends in .yaml or .yml. A
                table is returned as it is, so that functions can take any of them.

        Returns:
            the rules in the order of the file.

        Raises:
            ValueError: for a preset that is not there, with those that are, and for a file of another form, with its
                line and the rule's name.
        """
        if isinstance(source, LogicalRules):
            return source
        if isinstance(source, Path) or source.endswith((".yaml", ".yml")):
            return cls(_read(Path(source)))
        names = sorted(path.stem for path in PRESETS.glob("*.yaml"))
        if source not in names:
            raise ValueError(f"there is no preset {source!r}, only {', '.join(names)}; a path ends in .yaml or .yml")
        return cls(_read(PRESETS / f"{source}.yaml"))

    def override(self, rules: Iterable[tuple[str, Axes]]) -> "LogicalRules":
        """Replace all rules of the names in `rules`; the new ones come after the rest, in their own order."""
        new = LogicalRules(rules)
        return LogicalRules([*(rule for rule in self if rule[0] not in new.names), *new])


def _checked(rule: object, owner: str) -> tuple[str, tuple[str, ...]]:
    if not isinstance(rule, list | tuple) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
        raise ValueError(f"{owner} must be a logical name and its axes, got {rule!r}")
    return rule[0], axis_tuple(rule[1], f"{owner}, {rule[0]!r},")


def _read(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the rules of a file."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.SequenceNode):
            raise ValueError(f"{path}:1: rules must be a list with entries like '- exp: [expert]'")
        for node in root.value:
            yield _rule(node, f"{path}:{node.start_mark.line + 1}: a rule")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise ValueError(f"{path}:{line}: this is not YAML: {getattr(error, 'problem', error)}") from None


def _rule(node: yaml.Node, owner: str) -> tuple[str, tuple[str, ...]]:
    """Read one entry: the nodes of YAML know their lines, the values that they stand for do not."""
    value = yaml.SafeLoader("").construct_object(node, deep=True)
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"{owner} must be one 'name: axes', got {value!r}")
    return _checked(next(iter(value.items())), owner)
