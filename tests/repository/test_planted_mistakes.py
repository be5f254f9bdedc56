"""The table of planted mistakes fits the sources. planted_mistakes.py checks that tests find the mistakes."""

from dataclasses import replace
from pathlib import Path

import pytest

from repository import planted_cuda_mistakes
from repository.planted_mistakes import ROOT, Mistake, mistakes, problems


def test_every_mistake_can_be_planted() -> None:
    table = mistakes()
    assert not problems(ROOT, table)
    assert len({mistake.name for mistake in table}) == len(table) >= 60
    for mistake in table:
        assert mistake.wrong != mistake.right
        missing = [test for test in mistake.tests if not (ROOT / test).exists()]
        assert not missing, f"{mistake.name} names {missing}"


@pytest.mark.parametrize("text", ["", "x = 1\nx = 1\n"])
def test_a_text_that_is_not_there_once_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    mistake = Mistake("wrong-number", "a.py", "x = 1", "x = 2", ["a.py"])
    (message,) = problems(tmp_path, [mistake])
    assert "wrong-number: a.py must have the text once" in message
    assert len(problems(tmp_path, [replace(mistake, tests=["b.py"])])) == 2


def test_every_mistake_in_a_cuda_kernel_can_be_planted() -> None:
    table = planted_cuda_mistakes.mistakes()
    assert not planted_cuda_mistakes.problems(table)
    assert len({mistake.name for mistake in table}) == len(table) >= 30
    kernels = {path.stem for path in (ROOT / "cpp/cuda").glob("*.cu")} - {"library"}
    assert {mistake.kernel for mistake in table} == kernels
