"""The table that says which mesh axes shard the dims of each logical name."""

import reprlib
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from maxmoe.sharding.partition_spec import Axes, axis_tuple

PRESETS = Path(__file__).parent / "presets"
SOURCE = reprlib.Repr()
SOURCE.maxstring = 80
MAX_BYTES = 2**15
MAX_DEPTH = 3  # the list of rules, a rule, its axes
STRING, NULL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null"


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

        A file is a YAML list with one rule per entry: ``- name: [axis, ...]``, in UTF-8, of 32 KiB at most and without
        aliases.

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
        if not isinstance(source, str | Path):
            raise ValueError(f"rules must be LogicalRules, a preset or a path, got {reprlib.repr(source)}")
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
        raise ValueError(f"{owner} must be a logical name and its axes, got {reprlib.repr(rule)}")
    return rule[0], axis_tuple(rule[1], f"{owner}, {reprlib.repr(rule[0])},")


def _read(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the rules of a file."""
    text = _text(path)
    root = _compose(text, path)
    if not isinstance(root, yaml.SequenceNode):
        raise ValueError(f"{path}:1: rules must be a list with entries like '- exp: [expert]'")
    for node in root.value:
        yield _rule(node, text, f"{path}:{node.start_mark.line + 1}: a rule")


def _text(path: Path) -> str:
    """Read a file that may be anything: opening a FIFO waits for a writer, and a device may have no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path}: rules must be in a regular file")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path}: a file of rules has at most {MAX_BYTES} bytes, got {path.stat().st_size}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: rules must be UTF-8, got the byte {content[error.start]:#04x}") from None


def _compose(text: str, path: Path) -> yaml.Node | None:
    """Parse a file, but refuse deep nesting and aliases of aliases before they take time and memory."""
    line, depth = 1, 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise yaml.MarkedYAMLError(
                    problem="the axes of a rule have brackets in them", problem_mark=event.start_mark
                )
            if isinstance(event, yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem="it has an alias", problem_mark=event.start_mark)
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        line, problem = text.count("\n", 0, error.position) + 1, error.reason
    except yaml.MarkedYAMLError as error:
        line, problem = error.problem_mark.line + 1 if error.problem_mark else line, error.problem
    except (ValueError, OverflowError) as error:  # numbers in escapes and in directives
        problem = str(error)
    raise ValueError(f"{path}:{line}: this is no list of rules in YAML: {problem}")


def _rule(node: yaml.Node, text: str, owner: str) -> tuple[str, tuple[str, ...]]:
    """Read one entry from its nodes: values made of them are without lines, and a repeated key is lost."""
    source = SOURCE.repr(text[node.start_mark.index : node.end_mark.index].rstrip())
    if not isinstance(node, yaml.MappingNode) or len(node.value) != 1:
        raise ValueError(f"{owner} must be one 'name: axes', got {source}")
    ((key, value),) = node.value
    entries = value.value if isinstance(value, yaml.SequenceNode) else [] if value.tag == NULL else [value]
    if not all(isinstance(part, yaml.ScalarNode) and part.tag == STRING for part in (key, *entries)):
        raise ValueError(f"{owner} must be a logical name and its axes, got {source}")
    return _checked((key.value, [entry.value for entry in entries]), owner)
