"""Cases that run with `-m ""` alone, beside the ones that are chosen to run always."""

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """Return values for `parametrize`. Those that are not chosen run with `-m ""` alone."""
    values, chosen = list(values), list(chosen)
    if unknown := [value for value in chosen if value not in values]:
        raise ValueError(f"chosen must be among the values, got {unknown}")
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.slow) for value in values]
