"""Cases that run with `-m ""` alone, beside the ones that are chosen to run always."""

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Return values for `parametrize`. Those that are not chosen run with `-m ""` alone."""
    mark = pytest.mark.slow
    return [value if is_chosen else pytest.param(value, marks=mark) for value, is_chosen in with_choice(values, chosen)]


def cases_by_default(cases: Iterable[tuple[Any, ...]], chosen: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the same for several parameters of a test: a case has a value for each of them."""
    mark = pytest.mark.slow
    return [case if is_chosen else pytest.param(*case, marks=mark) for case, is_chosen in with_choice(cases, chosen)]


def with_choice(values: Iterable[Any], chosen: Iterable[Any]) -> list[tuple[Any, bool]]:
    """Return each value and whether it is chosen."""
    values, chosen = list(values), list(chosen)
    if unknown := [value for value in chosen if value not in values]:
        raise ValueError(f"chosen must be among the values, got {unknown}")
    return [(value, value in chosen) for value in values]
