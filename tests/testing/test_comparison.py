"""`compare_ranks` says "equal" of right training on several ranks, and finds mistakes by name and factor."""

import re
from pathlib import Path

import pytest
import torch

from support.compared_models import Case, Mistake
from support.forked_comparison import compare
from support.right_training import RIGHT, RIGHT_BUT_SLOW
from support.slow_cases import by_default
from support.wrong_training import WRONG, WRONG_BUT_SLOW

PAGE = (Path(__file__).parents[2] / "docs/how_to/public_bugs.md").read_text()
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


@pytest.mark.parametrize("name", by_default(RIGHT | RIGHT_BUT_SLOW, RIGHT))
def test_right_training_is_equal(name: str) -> None:
    case: Case = (RIGHT | RIGHT_BUT_SLOW)[name]
    comparison = compare(case)
    comparison.raise_if_different()
    assert all(gradient.error < 1e-12 for gradient in comparison.gradients)
    assert comparison.loss and comparison.gradients and comparison.step == case.steps


@pytest.mark.parametrize("name", by_default(WRONG | WRONG_BUT_SLOW, WRONG))
def test_mistakes_are_found_by_name_and_factor(name: str) -> None:
    mistake: Mistake = (WRONG | WRONG_BUT_SLOW)[name]
    comparison = compare(mistake.case, dtype=torch.float64)
    first = comparison.first_wrong
    assert comparison.verdict == "different" and first is not None, comparison
    assert re.sub(r" \(cosine .*\)", "", first.explanation) == mistake.explanation, comparison
    assert first.name == mistake.first_wrong, comparison
    assert all(output.equal for output in comparison.outputs), comparison
    assert str(comparison).startswith(" ".join(filter(None, ["compare_ranks: different", mistake.place])) + ". ")


def test_the_page_of_public_bugs_shows_these_explanations() -> None:
    shown = {re.split("`", line)[-2] for line in PAGE.splitlines() if line.startswith("| [")}
    found = {mistake.explanation for mistake in (WRONG | WRONG_BUT_SLOW).values()}
    elsewhere = {"gradient of the tokens of rank 1: 2 times: summed twice"}  # in test_training_runs.py
    assert len(shown) > 5 and shown <= found | elsewhere, shown - found
