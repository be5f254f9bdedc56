"""The tables of a device check: the tables in docs are the output of `benchmarks.device_report`."""

from pathlib import Path

import pytest

from benchmarks import device_report

ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / "docs" / name).read_text() for name in ("devices.md", "performance.md")]
RUNS = sorted((ROOT / "benchmarks/device_results").iterdir())


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_the_tables_of_the_pages_are_up_to_date(folder: Path) -> None:
    sections = device_report.read(folder)
    tables = device_report.tables(sections)
    assert len(tables) > 5
    assert not [table for table in tables if not any(table in page for page in PAGES)]
    assert sections["machine"]["device"] in PAGES[0] and sections["machine"]["driver"] in PAGES[0]
