"""Grouping of the repeated layers of a model, for one table row per group."""

import re
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from maxmoe.text_table import ranges

Item = TypeVar("Item")


def group_repeated(
    items: Iterable[Item], path: Callable[[Item], str], key: Callable[[Item], Hashable]
) -> list[tuple[str, list[Item]]]:
    """Group items with equal keys whose paths differ in one number, under labels as "blocks.3-60.norm.weight x58"."""
    groups: dict[Hashable, list[tuple[str, Item]]] = {}
    for item in items:
        prefix, number, suffix = re.fullmatch(r"(?:(.*?\.)??(\d+)(?=\.|$))?(.*)", path(item)).groups("")  # type: ignore[union-attr]
        groups.setdefault((prefix, suffix, key(item)), []).append((number, item))
    result = []
    for (prefix, suffix, _), members in groups.items():  # type: ignore[misc]
        numbers = [int(number) for number, _ in members if number]
        count = f" x{len(members)}" if len(members) > 1 else ""
        result.append((f"{prefix}{ranges(numbers, ',')}{suffix}{count}", [item for _, item in members]))
    return result
