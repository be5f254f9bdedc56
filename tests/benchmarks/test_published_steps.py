"""The table in docs/costs.md is the output of `benchmarks.published_steps`."""

from pathlib import Path

import pytest

from benchmarks.published_steps import ROWS, Published
from maxmoe.costs.search_result import ERRORS
from support.slow_cases import by_default

PAGE = (Path(__file__).parents[2] / "docs/costs.md").read_text()


# By default one without stages.
@pytest.mark.parametrize(
    "published", by_default(ROWS, ROWS[-1:]), ids=lambda row: f"{row.model.name}, {row.device_name or row.device}"
)
def test_the_table_is_up_to_date(published: Published) -> None:
    assert published.row() in PAGE.splitlines()


def test_the_first_line_of_a_search_has_the_errors_of_the_table() -> None:
    errors = [
        int(line.split("|")[-2].split()[0]) for line in PAGE.splitlines() if line.endswith(" % |") and "http" in line
    ]
    assert len(errors) == len(ROWS) and (min(errors), max(errors)) == ERRORS
