"""Cases that `make test` leaves out of tests marked `sampled`; `--exhaustive` runs them all."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest


def by_default(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Return values for `parametrize`. Those that are not chosen run with `--exhaustive` alone."""
    values, chosen = list(values), list(chosen)
    if unknown := [value for value in chosen if value not in values]:
        raise ValueError(f"chosen must be among the values, got {unknown}")
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.sampled(0)) for value in values]


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases beyond the number that `@pytest.mark.sampled(number)` gives, the same ones in every run.

    Chosen by a hash of the id, so that all values of several parameters occur. The mark of a `pytest.param` counts the
    cases with this mark separately.
    """
    groups: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            (number,) = mark.args
            groups[item.nodeid.partition("[")[0], number].append(item)
    return {
        item
        for (_, number), cases in groups.items()
        for item in sorted(cases, key=lambda case: hashlib.sha256(case.nodeid.encode()).digest())[number:]
    }
