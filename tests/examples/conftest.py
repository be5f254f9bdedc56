"""What the examples read."""

from pathlib import Path

import pytest

from support.pretrain_run import words


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return words(tmp_path / "text")
