"""`compare_ranks` says "equal" of right training on several ranks, and finds mistakes by name and factor."""

import pytest

from support.forked_comparison import compare
from support.right_training import RIGHT
from support.wrong_training import WRONG

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


@pytest.mark.parametrize("name", RIGHT)
def test_right_training_is_equal(name: str) -> None:
    comparison = compare(RIGHT[name])
    comparison.raise_if_different()
    assert all(gradient.error < 1e-12 for gradient in comparison.gradients)
    assert comparison.loss and comparison.gradients


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_found_by_name_and_factor(name: str) -> None:
    comparison = compare(WRONG[name])
    first = comparison.first_wrong
    assert comparison.verdict == "different" and first is not None, comparison
    assert first.explanation == WRONG[name].explanation, comparison
    assert first.name == (WRONG[name].first_wrong or comparison.gradients[0].name), comparison
