"""Names of cases in errors, where one test checks several."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def named(*names: object) -> Iterator[None]:
    """Begin the error of a case with its name."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"{', '.join(map(str, names))}: {error}") from error
