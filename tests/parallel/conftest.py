"""Ranks compare the names of their collectives in all tests of this folder."""

import pytest

from maxmoe.ranks.named_collectives import CHECK_VARIABLE


@pytest.fixture(autouse=True)
def collectives_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "1")


@pytest.fixture
def collectives_are_not_compared(collectives_are_compared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count collectives."""
    monkeypatch.delenv(CHECK_VARIABLE)
