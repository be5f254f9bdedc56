"""Rules that a search tries, with their names."""

from collections.abc import Sequence
from dataclasses import dataclass

from maxmoe.sharding.rules import LogicalRules, preset_names


@dataclass(frozen=True)
class NamedRules:
    """Rules with their name."""

    name: str
    rules: LogicalRules


def tables(rules: Sequence[str] | None) -> list[NamedRules]:
    """Load presets or files by name; None for all presets."""
    return [NamedRules(name, LogicalRules.load(name)) for name in (preset_names() if rules is None else rules)]
