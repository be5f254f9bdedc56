"""The texts that examples read, and their number of threads."""

from pathlib import Path

import pytest

from examples.pretrain_run import words


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return words(tmp_path / "text")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that a test starts have one thread, as the test has."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
