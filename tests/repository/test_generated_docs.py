"""The tables of docs/ are those that scripts print now, and the scripts of its pictures draw."""

from pathlib import Path

import pytest

from benchmarks import device_report
from benchmarks.published_steps import ROWS
from maxmoe.costs.search_result import ERRORS
from support.documented import DOCS, docs_module

RESULTS = sorted((DOCS.parent / "benchmarks/device_results").iterdir())
TABLES = [
    ("dispatch", "dispatch_pictures", "bytes_table"),
    ("layer", "config_table", "config_table"),
    ("layer", "config_table", "component_table"),
    pytest.param("optimizers", "optimizer_tables", "traffic", marks=pytest.mark.slow),
    pytest.param("recomputation", "recomputation_tables", "kept", marks=pytest.mark.slow),
    ("sharding", "sharding_tables", "placements"),
    pytest.param("sharding", "sharding_tables", "collectives", marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore:the rules shard sequences")
@pytest.mark.parametrize(("page", "script", "table"), TABLES)
def test_a_table_is_up_to_date(page: str, script: str, table: str) -> None:
    assert getattr(docs_module(script), table)().strip("\n") + "\n" in (DOCS / f"{page}.md").read_text()


@pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.name)
def test_the_tables_of_a_device_are_up_to_date(folder: Path) -> None:
    pages = [(DOCS / f"{name}.md").read_text() for name in ("devices", "performance")]
    tables = device_report.tables(device_report.read(folder))
    assert tables and not [table for table in tables if not any(table in page for page in pages)]


@pytest.mark.slow
def test_the_table_of_published_steps_is_up_to_date() -> None:
    lines = (DOCS / "costs.md").read_text().splitlines()
    assert not [row for row in (published.row() for published in ROWS) if row not in lines]
    errors = [int(line.split("|")[-2].split()[0]) for line in lines if line.endswith(" % |") and "http" in line]
    assert (min(errors), max(errors)) == ERRORS  # which a search prints


@pytest.mark.parametrize(
    ("script", "picture"),
    [
        ("concept_pictures", "ragged_picture"),
        ("concept_pictures", "routing_picture"),
        ("overview_picture", "picture"),
        pytest.param("pipeline_pictures", "schedules_picture", marks=pytest.mark.slow),
    ],
)
def test_a_picture_is_drawn(script: str, picture: str) -> None:
    assert any(axes.texts for axes in getattr(docs_module(script), picture)().axes)
