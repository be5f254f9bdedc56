"""docs/how_to/compare_ranks.md: its commands run on its modules, and print the shown output."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from maxmoe.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs/how_to/compare_ranks.md").read_text()
SOURCES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
(REPORT,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_modules_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.syspath_prepend(tmp_path)
    for number, source in enumerate(SOURCES):
        (tmp_path / f"page_{number}.py").write_text(source)
        module = importlib.import_module(f"page_{number}")
        (test,) = (function for name, function in vars(module).items() if name.startswith("test_"))
        test()
    assert main(["compare_ranks", "page_1", "--num-ranks", "4"]) == 1
    assert without_errors(capsys.readouterr().out) == without_errors(REPORT)
    assert main(["compare_ranks", "page_2"]) == 0
    assert capsys.readouterr().out.startswith("compare_ranks: equal. 2 ranks beside one process, float64")


def test_the_page_for_other_frameworks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    page = (Path(__file__).parents[2] / "docs/how_to/check_your_framework.md").read_text()
    training, update, test = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_training.py").write_text(training)
    assert main(["compare_ranks", "my_training", "--num-ranks", "4"]) == 1
    assert capsys.readouterr().out.startswith(shown)
    mended = training.replace("model[0].parameters()", "model.parameters()")
    (tmp_path / "mended_training.py").write_text(f"{mended}\n\n{update}")
    assert main(["compare_ranks", "mended_training", "--num-ranks", "4", "--steps", "3"]) == 0
    assert capsys.readouterr().out.startswith("compare_ranks: equal in 3 steps. 4 ranks")
    names: dict[str, Any] = {}
    exec(test, names)
    with pytest.raises(AssertionError, match="missing reduction"):
        names["test_ranks_train_as_one_process"]()


def without_errors(report: str) -> list[list[str]]:
    """The words of the lines, without errors of rounding."""
    return [[word for word in line.split() if not re.fullmatch(r"-+|\de-\d\d|0", word)] for line in report.splitlines()]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("no_such_module", "there is no module 'no_such_module' to import from this folder"),
        ("shlex", "shlex must have the functions build_model, parallelize, make_batch, loss, got no build_model, "),
        ("failing_module", "No module named 'no_such_library'"),
    ],
)
def test_modules_that_cannot_be_compared(
    module: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code differs from the code for different gradients."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_module.py").write_text("import no_such_library")
    assert main(["compare_ranks", module]) == 2
    assert message in capsys.readouterr().err
