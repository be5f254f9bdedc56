"""docs/sharding.md has the tables and the pictures that the code makes."""

from types import ModuleType

import pytest

from maxmoe.sharding import P
from maxmoe.sharding.rules import PRESETS
from support.docs_module import DOCS, docs_module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return docs_module("sharding_tables")


def test_the_tables_are_up_to_date(tables: ModuleType) -> None:
    text = (DOCS / "sharding.md").read_text()
    assert f"\n{tables.placements()}\n" in text
    assert f"\n{tables.collectives()}\n" in text


def test_every_preset_is_described_and_drawn(tables: ModuleType) -> None:
    text = (DOCS / "sharding.md").read_text()
    presets = {path.stem for path in PRESETS.glob("*.yaml")}
    assert set(tables.MESHES) == presets
    assert all(f"(sharding_{preset}.png)" in text and f"| {preset} | " in text for preset in presets)
    assert {path.stem.removeprefix("sharding_") for path in DOCS.glob("sharding_*.png")} == presets


def test_blocks_cover_a_weight_once_and_all_ranks_hold_one(tables: ModuleType) -> None:
    for preset, sizes in tables.MESHES.items():
        for names in (tables.EXPERTS, tables.DENSE):
            blocks = tables.holders(preset, names)
            numbers = 0
            for block in blocks:
                size = 1
                for start, stop in block:
                    size *= stop - start
                numbers += size
            assert numbers == tables.LENGTH**2 * (tables.NUM_EXPERTS if names is tables.EXPERTS else 1)
            ranks = sorted(rank for holders in blocks.values() for rank in holders)
            assert len(ranks) == len(set(ranks)) and len(ranks) in {2 ** len(sizes), 4}


def test_known_places(tables: ModuleType) -> None:
    assert tables.sharding("shard-exp-on-fsdp", tables.EXPERTS).spec == P(("expert", "fsdp"), None, None)
    holders = tables.holders("shard-exp-on-fsdp", tables.EXPERTS)
    # Expert 1 is the second half of what expert=0 holds: fsdp=1, expert=0.
    assert holders[(1, 2), (0, 8), (0, 8)] == [2]
    assert tables.holders("ep-tp", tables.DENSE) == {((0, 8), (0, 4)): [0, 2], ((0, 8), (4, 8)): [1, 3]}


@pytest.mark.parametrize("preset", ["default", "ep-tp"])
def test_a_picture_shows_every_block(tables: ModuleType, preset: str) -> None:
    figure = tables.picture(preset)
    labels = sum(len(panel.texts) for panel in figure.axes)
    by_expert = sum(stop - start for (start, stop), *_ in tables.holders(preset, tables.EXPERTS))
    assert labels == by_expert + len(tables.holders(preset, tables.DENSE))
