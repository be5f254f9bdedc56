"""What the examples read, and how they run."""

from pathlib import Path

import pytest

from support.pretrain_run import words


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return words(tmp_path / "text")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the processes that a test starts, as of its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
