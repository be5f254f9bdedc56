"""docs/dispatch.md has the table and the pictures that the code makes, and the pictures show the real moves."""

from collections import Counter
from types import ModuleType
from typing import get_args

import pytest

from maxmoe.parallel.plan.dispatch_plan import STRATEGIES, Dispatch
from support.docs_module import DOCS, docs_module


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    return docs_module("dispatch_pictures")


def test_the_table_is_up_to_date(pictures: ModuleType) -> None:
    assert f"\n{pictures.bytes_table()}\n" in (DOCS / "dispatch.md").read_text()


def test_bytes_by_hand(pictures: ModuleType) -> None:
    rows = {line.split(" | ")[0]: line for line in pictures.bytes_table(tokens=2**20, num_ranks=2).splitlines()}
    assert "| 16.00 GiB |" in rows["| ring_of_experts"]  # 2 (2 - 1) 2^20 4096 numbers of 2 bytes
    assert "| 16.00 GiB |" in rows["| ragged_all_to_all"]  # the same number for K = P = 2
    assert "| 1.31 GiB |" in rows["| gather_weights"]  # 3 / 2 of 8 x 4096 x 14336 numbers


def test_every_strategy_is_described_and_drawn(pictures: ModuleType) -> None:
    text = (DOCS / "dispatch.md").read_text()
    assert set(get_args(Dispatch)) == {"auto", *STRATEGIES}
    assert not [name for name in get_args(Dispatch) if f'`"{name}"`' not in text]
    assert not [name for name in (*pictures.STRATEGIES, "strategies") if f"(dispatch_{name}.png)" not in text]
    drawn = {path.stem.removeprefix("dispatch_") for path in DOCS.glob("dispatch_*.png")}
    assert drawn == {*pictures.STRATEGIES, "strategies"}
    assert not STRATEGIES.keys() - pictures.STRATEGIES.keys()


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "least_loaded"])
def test_every_row_is_computed_once_on_the_rank_of_its_expert(pictures: ModuleType, name: str) -> None:
    expected = Counter((token, f"e{e}") for token, row in enumerate(pictures.routing().tolist()) for e in row)
    (computed,) = [ranks for text, ranks in pictures.STRATEGIES[name]() if "comput" in text]
    assert Counter((box.token, box.label) for boxes in computed for box in boxes) == expected
    if name != "gather_weights":
        per_rank = pictures.EXPERTS // pictures.NUM_RANKS
        assert all(int(box.label[1:]) // per_rank == rank for rank, boxes in enumerate(computed) for box in boxes)


def test_least_loaded_ranks_compute_the_rows_of_others(pictures: ModuleType) -> None:
    """Every row appears once, and no rank has many more rows than the mean."""
    routing = pictures.uneven_routing().tolist()
    expected = Counter((token, f"e{e}") for token, row in enumerate(routing) for e in row)
    (computed,) = [ranks for text, ranks in pictures.STRATEGIES["least_loaded"]() if "comput" in text]
    assert Counter((box.token, box.label) for boxes in computed for box in boxes) == expected
    assert max(map(len, computed)) <= 1.15 * sum(map(len, computed)) / pictures.NUM_RANKS
    per_rank, owned = pictures.EXPERTS // pictures.NUM_RANKS, [box for row in computed for box in row]
    assert any(box.is_foreign for box in owned)
    for rank, boxes in enumerate(computed):
        assert all(box.is_foreign == (int(box.label[1:]) // per_rank != rank) for box in boxes)


def test_a_picture_shows_every_box_and_stage(pictures: ModuleType) -> None:
    for name, stages in pictures.STRATEGIES.items():
        (axes,) = pictures.picture(name).axes
        boxes = sum(len(row) for _, ranks in stages() for row in ranks)
        assert len(axes.texts) == boxes + len(stages()) + pictures.NUM_RANKS
