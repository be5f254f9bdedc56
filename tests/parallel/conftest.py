"""All tests of this folder compare the names of collectives across ranks."""

import pytest

from maxmoe.ranks.named_collectives import CHECK_VARIABLE


@pytest.fixture(autouse=True)
def collectives_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "1")


@pytest.fixture
def collectives_are_not_compared(collectives_are_compared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count collectives, or the time in which they run."""
    monkeypatch.delenv(CHECK_VARIABLE)
