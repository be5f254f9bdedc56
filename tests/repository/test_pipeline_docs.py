"""docs/sharding.md has the pictures of schedules, which show every action of a timeline."""

import itertools
from types import ModuleType

import pytest
from matplotlib.patches import Rectangle

from maxmoe.pipelining.schedules import SCHEDULES
from support.docs_module import DOCS, docs_module


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    return docs_module("pipeline_pictures")


def test_the_pictures_are_in_the_page() -> None:
    text = (DOCS / "sharding.md").read_text()
    found = sorted(path.name for path in DOCS.glob("pipeline_*.png"))
    assert found == ["pipeline_recorded.png", "pipeline_schedules.png"]
    assert all(f"({name})" in text for name in found)


def test_a_picture_shows_every_action(pictures: ModuleType) -> None:
    figure = pictures.schedules_picture()
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == list(SCHEDULES)
    for axes, schedule in zip(figure.axes, SCHEDULES, strict=True):
        spans = [span for spans in pictures.planned(schedule).ranks for span in spans]
        boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert sorted(box.get_x() for box in boxes) == sorted(span.start for span in spans)
        assert sum(box.get_width() for box in boxes) == pytest.approx(sum(span.end - span.start for span in spans))
        assert sorted(text.get_text() for text in axes.texts) == sorted(str(span.action.micro_batch) for span in spans)


def test_boxes_of_a_rank_do_not_overlap(pictures: ModuleType) -> None:
    figure = pictures.recorded_picture("zbv", pictures.planned("zbv"))
    for axes in figure.axes:
        rows: dict[float, list[tuple[float, float]]] = {}
        for box in axes.patches:
            rows.setdefault(box.get_y(), []).append((box.get_x(), box.get_x() + box.get_width()))
        assert len(rows) == pictures.NUM_RANKS
        for row in rows.values():
            ordered = sorted(row)
            assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(ordered))
