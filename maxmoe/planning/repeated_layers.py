"""One row for what is repeated in a model, layer by layer."""

import re
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def grouped(
    items: Iterable[Item], path: Callable[[Item], str], facts: Callable[[Item], Hashable]
) -> list[tuple[str, list[Item]]]:
    """Group what differs in one number of its path only.

    Args:
        items: in order.
        path: of an item in the model.
        facts: equal for the items of a group.

    Returns:
        Labels, as "blocks.3-60.norm.weight x58", and the items of each.
    """
    groups: dict[Hashable, list[tuple[str, Item]]] = {}
    for item in items:
        prefix, number, suffix = re.fullmatch(r"(?:(.*?\.)??(\d+)(?=\.|$))?(.*)", path(item)).groups("")  # type: ignore[union-attr]
        groups.setdefault((prefix, suffix, facts(item)), []).append((number, item))
    result = []
    for (prefix, suffix, _), members in groups.items():  # type: ignore[misc]
        numbers = [int(number) for number, _ in members if number]
        count = f" x{len(members)}" if len(members) > 1 else ""
        result.append((f"{prefix}{_ranges(numbers)}{suffix}{count}", [item for _, item in members]))
    return result


def _ranges(numbers: list[int]) -> str:
    """Write increasing numbers as "0-2,5"."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
