"""Ranks compare the names of their collectives in all tests of this folder."""

import pytest

from maxmoe.named_collectives import CHECK_VARIABLE


@pytest.fixture(autouse=True)
def collectives_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "1")
