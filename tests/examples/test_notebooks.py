"""The notebooks run from top to bottom, and are stored as they ran."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient")

import nbformat

from examples.pretrain_run import EXAMPLES
from notebooks.execute import FOLDER
from support import programs
from support.slow_cases import by_default

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 500_000
# Numbers of training steps, and smaller ones for the test, which checks the kinds of outputs, not the losses.
SHORTER = {
    "moe_against_dense": ("steps=500", "steps=30"),
    "muon": ("steps=150", "steps=20"),
    "parallel_plans": ("range(10)", "range(1)"),
    "quick_start": ("range(200)", "range(5)"),
    "routing_and_balance": ("steps=150", "steps=30"),
    "transformers_models": ("range(80)", "range(5)"),
}


# As `python examples/notebooks/execute.py` does, but for the replacement, and into another file.
EXECUTE = """
import json, sys
from pathlib import Path
import nbformat
from notebooks.execute import execute
source, replacement, target = map(json.loads, sys.argv[1:])
nbformat.write(execute(Path(source), replacement=replacement), target)
"""


def executed_notebook(path: Path, target: Path) -> nbformat.NotebookNode:
    arguments = [json.dumps(each) for each in (str(path), SHORTER.get(path.stem, ("", "")), str(target))]
    done = programs.run([sys.executable, "-c", EXECUTE, *arguments], cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr
    return nbformat.read(target, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", by_default(NOTEBOOKS, [FOLDER / "quick_start.ipynb"]), ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    stored, executed = nbformat.read(path, as_version=4), executed_notebook(path, tmp_path / path.name)
    for old, new in zip(code_cells(stored), code_cells(executed), strict=True):
        assert kinds(new) == kinds(old), new.source  # the stored outputs belong to this code


def kinds(cell: nbformat.NotebookNode) -> set[str]:
    """The kinds of a cell's outputs: text, pictures, values. Their numbers depend on processor and Python."""
    return {kind for output in cell.outputs for kind in output.get("data", {output.get("name"): None})}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_as_it_ran(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    if path.stem in SHORTER:
        assert "\n".join(cell.source for cell in cells).count(SHORTER[path.stem][0]) == 1
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert notebook.cells[0].source.startswith("# ") and path.stat().st_size < MAX_BYTES
