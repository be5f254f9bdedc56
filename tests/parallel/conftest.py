"""With slow cases, the tests of this folder compare the names of collectives across ranks.

By default they run what users run, because each comparison is one more collective.
"""

import pytest

from maxmoe.ranks.named_collectives import CHECK_VARIABLE


@pytest.fixture(autouse=True)
def collectives_are_compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.option.markexpr != "not slow":
        monkeypatch.setenv(CHECK_VARIABLE, "1")


@pytest.fixture
def collectives_are_not_compared(collectives_are_compared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the comparison, for tests that count collectives or measure their time."""
    monkeypatch.delenv(CHECK_VARIABLE, raising=False)
