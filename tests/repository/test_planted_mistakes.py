"""The mistakes can be planted, at one place each. planted_mistakes.py checks that tests find them."""

import ast
from pathlib import Path

import pytest

from repository import planted_cuda_mistakes, planted_mistakes
from repository.planted_mistakes import ROOT, Mistake, problems


@pytest.mark.parametrize("table", [planted_mistakes.mistakes(), planted_cuda_mistakes.mistakes()], ids=["all", "cuda"])
def test_every_mistake_can_be_planted(table: list[Mistake]) -> None:
    assert not problems(table)
    assert len({mistake.name for mistake in table}) == len(table) >= 60
    for mistake in table:
        assert mistake.wrong != mistake.right
        assert all((ROOT / test).exists() for test in mistake.tests), f"{mistake.name} names {mistake.tests}"
        if mistake.file.endswith(".py"):
            ast.parse(mistake.planted())


def test_every_cuda_kernel_has_mistakes() -> None:
    kernels = {path.stem for path in (ROOT / "cpp/cuda").glob("*.cu")} - {"library"}
    assert {mistake.kernel for mistake in planted_cuda_mistakes.mistakes()} == kernels


def test_a_mistake_is_planted_in_one_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planted_mistakes, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("x = 1\nclass A:\n    @g\n    def f(self):\n        x =  1\n        return x\n")
    planted = Mistake("wrong-number", "a.A.f", "x = 1", "x = 2").planted()
    assert planted == "x = 1\nclass A:\n    @g\n    def f(self):\n        x = 2\n        return x\n"
    assert "    @h\n" in Mistake("wrong-decorator", "a.A.f", "@g", "@h").planted()
    for where, right, count in [("a", "x = 1", 2), ("a.A", "x = 2", 0), ("a.B", "x = 1", 0), ("b", "x = 1", 0)]:
        (message,) = problems([Mistake("wrong-number", where, right, "x = 2")])
        assert message == f"wrong-number: {where} must have the text once, got {count}: {right}"
