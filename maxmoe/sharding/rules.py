"""Table of rules that map logical names of dims to mesh axes."""

import reprlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from maxmoe.sharding.partition_spec import Axes, axis_tuple

PRESETS = Path(__file__).parent / "presets"
# YAML tags that are allowed at each depth: the list, a rule, its name and axes, an axis.
TAGS = [["seq"], ["map"], ["str", "seq", "null"], ["str"]]


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

        A file is a YAML list with one rule per entry: ``- name: [axis, ...]``, in UTF-8 and without
        aliases.

        Args:
            source: name of a preset, or path of a file: a `Path`, or a string that ends in .yaml or .yml. Rules are
                returned unchanged.

        Returns:
            Rules in the order of the file.

        Raises:
            ValueError: for an unknown preset, with the names of all presets; for a file of another form, with the
                number of the line or of the rule, counted from 0.
        """
        if isinstance(source, LogicalRules):
            return source
        if not isinstance(source, str | Path):
            raise ValueError(f"rules must be LogicalRules, a preset or a path, got {reprlib.repr(source)}")
        if isinstance(source, Path) or source.endswith((".yaml", ".yml")):
            return cls._from_file(Path(source))
        if source not in preset_names():
            known = ", ".join(preset_names())
            raise ValueError(f"there is no preset {source!r}, only {known}; a path ends in .yaml or .yml")
        return _preset(source)

    @classmethod
    def _from_file(cls, path: Path) -> "LogicalRules":
        """Load a file; every error message begins with the path, and with the line number if PyYAML gives it."""
        try:
            rules = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
            if rules is None:
                raise ValueError("rules must be a list with entries like '- exp: [expert]', got nothing")
            return cls(pair for rule in rules for pair in rule.items())
        except yaml.MarkedYAMLError as error:
            where = f":{error.problem_mark.line + 1}"
            problem = f"this is no list of rules in YAML: {error.problem[:200]}"
        except (yaml.YAMLError, ValueError, OverflowError) as error:  # errors in characters and numbers have no line
            where, problem = "", str(error).splitlines()[0]
        raise ValueError(f"{path}{where}: {problem}")

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
    return LogicalRules._from_file(PRESETS / f"{name}.yaml")


def _checked(rule: object, owner: str) -> tuple[str, tuple[str, ...]]:
    if not isinstance(rule, list | tuple) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
        raise ValueError(f"{owner} must be a logical name and its axes, got {reprlib.repr(rule)}")
    return rule[0], axis_tuple(rule[1], f"{owner}, {reprlib.repr(rule[0])},")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader, restricted to tables of rules: no other tags, no repeated keys, no aliases."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node:
        event = self.peek_event()
        _require(not isinstance(event, yaml.AliasEvent), event, "it has an alias")
        _require(self.depth < len(TAGS), event, "the axes of a rule have brackets in them")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        tag, size = node.tag.removeprefix("tag:yaml.org,2002:"), len(node.value)
        _require(tag in TAGS[self.depth], node, f"entries must be like '- exp: [expert]', got {tag!r}")
        _require(tag != "map" or size == 1, node, f"a rule must be one 'name: axes', got {size} names")
        return node


def _require(condition: bool, place: yaml.Event | yaml.Node, problem: str) -> None:
    if not condition:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)
