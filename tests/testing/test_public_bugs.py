"""`compare_ranks` finds the mistakes of public issues, and docs/how_to/public_bugs.md shows its output."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from support.compared_models import Case, Model, ddp
from support.forked_comparison import compare
from support.public_bugs import BUGS, FIRST, row
from support.sampling import by_default

PAGE = (Path(__file__).parents[2] / "docs/how_to/public_bugs.md").read_text()


# Bugs with explanations that no case of `test_comparison.py` or `test_steps.py` has.
BY_DEFAULT = {
    "sentinel slots",
    "weights of other experts",
    "mean of means",
    "replaced parameters",
}


@pytest.mark.parametrize("name", by_default(BUGS, BY_DEFAULT))
def test_the_mistake_is_found(name: str) -> None:
    case = BUGS[name].case
    comparison = compare(case, dtype=torch.float64)
    first = comparison.first_wrong
    assert comparison.verdict == "different" and first is not None, comparison
    assert first.name == (case.first_wrong or FIRST), comparison
    where = f" {BUGS[name].place}" if BUGS[name].place else ""
    assert str(comparison).startswith(f"compare_ranks: different{where}. "), comparison
    if not BUGS[name].half:
        assert first.explanation == case.explanation, comparison
    else:  # the cause has no name, and the outputs show its half of the step
        is_forward = "The mistake is in the forward pass" in str(comparison)
        assert is_forward == (BUGS[name].half == "forward"), comparison
        assert re.fullmatch(rf"{case.explanation} \(cosine -?[0-9.]+\)", first.explanation), comparison


def build_dead() -> nn.Module:
    model = Model()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def test_two_dead_models_are_not_compared() -> None:
    """Weights that were not loaded (NVIDIA-NeMo/Automodel#3701) get random values before the comparison."""
    comparison = compare(Case(ddp, 2, build=build_dead), dtype=torch.float64)
    assert comparison.equal and all(gradient.one_process > 0 for gradient in comparison.gradients)


def test_the_page_has_the_table() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| [")]
    assert rows == [row(bug) for bug in BUGS.values()]
