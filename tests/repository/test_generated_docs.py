"""The tables of docs/ are those that its scripts print now, and the scripts draw pictures."""

from typing import Any, get_args

import pytest

from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding.rules import PRESETS
from support.docs_module import DOCS, docs_module

TABLES = [
    ("dispatch", "dispatch_pictures", "bytes_table"),
    ("layer", "config_table", "config_table"),
    ("layer", "config_table", "component_table"),
    pytest.param("optimizers", "optimizer_tables", "traffic", marks=pytest.mark.slow),
    pytest.param("recomputation", "recomputation_tables", "kept", marks=pytest.mark.slow),
    ("sharding", "sharding_tables", "placements"),
    ("sharding", "sharding_tables", "collectives"),
]


@pytest.mark.filterwarnings("ignore:the rules shard sequences")
@pytest.mark.parametrize(("page", "script", "table"), TABLES)
def test_a_table_is_up_to_date(page: str, script: str, table: str) -> None:
    assert getattr(docs_module(script), table)().strip("\n") + "\n" in (DOCS / f"{page}.md").read_text()


@pytest.mark.parametrize(
    ("script", "picture", "arguments"),
    [
        ("concept_pictures", "ragged_picture", []),
        ("concept_pictures", "routing_picture", []),
        ("dispatch_pictures", "picture", ["least_loaded"]),
        ("overview_picture", "picture", []),
        ("pipeline_pictures", "schedules_picture", []),
        ("sharding_tables", "picture", ["ep-tp"]),
    ],
)
def test_a_picture_is_drawn(script: str, picture: str, arguments: list[Any]) -> None:
    figure = getattr(docs_module(script), picture)(*arguments)
    assert any(axes.texts for axes in figure.axes)


def test_every_strategy_and_preset_is_described() -> None:
    dispatch, sharding = ((DOCS / f"{page}.md").read_text() for page in ("dispatch", "sharding"))
    assert not [name for name in get_args(Dispatch) if f'`"{name}"`' not in dispatch]
    assert not [path.stem for path in PRESETS.glob("*.yaml") if f"| {path.stem} | " not in sharding]
