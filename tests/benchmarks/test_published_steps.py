"""The table of docs/planning.md is what `benchmarks.published_steps` prints."""

from pathlib import Path

import pytest

from benchmarks.published_steps import ROWS, Published

PAGE = (Path(__file__).parents[2] / "docs/planning.md").read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("published", ROWS, ids=lambda row: f"{row.model.name}, {row.device}")
def test_the_table_is_up_to_date(published: Published) -> None:
    assert published.row() in PAGE.splitlines()
