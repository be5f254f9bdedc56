"""The notebooks run from top to bottom, and are stored as they ran."""

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

pytest.importorskip("nbclient")

import nbformat

from notebooks.execute import FOLDER, execute
from support.forked_python import SUBPROCESSES_OF_TORCHRUN, ForkedPython
from support.python_with_torch import Python

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ROOT = Path(__file__).parents[2]
MAX_BYTES = 500_000
# Numbers of training steps, and as many as the test needs: it asks what cells leave, not how far a loss has come.
SHORTER = {
    "moe_against_dense": ("steps=500", "steps=30"),
    "muon": ("steps=150", "steps=20"),
    "parallel_plans": ("range(10)", "range(1)"),
    "quick_start": ("range(200)", "range(5)"),
    "routing_and_balance": ("steps=150", "steps=30"),
    "transformers_models": ("range(80)", "range(5)"),
}


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def executed(request: pytest.FixtureRequest) -> Iterator[dict[Path, Future[nbformat.NotebookNode]]]:
    """The notebooks of the tests that were chosen, two at a time: each has one thread.

    In processes of their own: threads of their clients would allocate memory here, which other tests bound. They and
    their kernels are forked, and so is what cells start: they have torch.
    """
    chosen = [item.callspec.params["path"] for item in request.session.items if "executed" in item.fixturenames]
    with pytest.MonkeyPatch.context() as monkeypatch, ProcessPoolExecutor(2, get_context("fork")) as pool:
        for module in ("jupyter_client.launcher", "subprocess", SUBPROCESSES_OF_TORCHRUN):
            monkeypatch.setattr(f"{module}.Popen", ForkedPython)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in conftest.py
        yield {path: pool.submit(execute, path, replacement=SHORTER.get(path.stem, ("", ""))) for path in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path, executed: dict[Path, Future[nbformat.NotebookNode]]) -> None:
    stored = nbformat.read(path, as_version=4)
    for old, new in zip(code_cells(stored), code_cells(executed[path].result()), strict=True):
        assert kinds(new) == kinds(old), new.source  # the stored ones are of this code


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_can_be_copied(path: Path, tmp_path: Path, python: Python) -> None:
    """It needs the package, and no file beside the notebook."""
    first, *_ = code_cells(nbformat.read(path, as_version=4))
    done = python(f"import sys; sys.path.insert(1, {str(ROOT)!r})\n{first.source}", tmp_path)
    assert done.returncode == 0, done.stderr


def kinds(cell: nbformat.NotebookNode) -> set[str]:
    """What a cell left: text, pictures, values. The numbers differ from one processor and Python to the next."""
    return {kind for output in cell.outputs for kind in output.get("data", {output.get("name"): None})}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_as_it_ran(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert notebook.cells[0].source.startswith("# ") and path.stat().st_size < MAX_BYTES


def test_there_are_notebooks() -> None:
    assert {"quick_start", "ragged_operators", "routing_and_balance"} <= {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("name", SHORTER)
def test_the_number_of_steps_is_written_once(name: str) -> None:
    cells = code_cells(nbformat.read(FOLDER / f"{name}.ipynb", as_version=4))
    assert "\n".join(cell.source for cell in cells).count(SHORTER[name][0]) == 1
