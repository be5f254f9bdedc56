"""Runs the notebooks from top to bottom and stores what they print and draw.

python examples/notebooks/execute.py                     # all
python examples/notebooks/execute.py quick_start muon    # some
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def execute(path: Path, timeout: int = 900, replacement: tuple[str, str] = ("", "")) -> nbformat.NotebookNode:
    """Run a notebook in its folder.

    Args:
        path: path of the notebook.
        timeout: seconds for each cell.
        replacement: text in code cells, and the text that is run in its place.

    Returns:
        The notebook with new outputs.

    Raises:
        CellExecutionError: if a cell raises an error.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = cell.source.replace(*replacement)
    # A warning of tqdm, which transformers imports.
    environment = os.environ | {"PYTHONWARNINGS": "ignore:IProgress not found"}
    client = NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": path.parent}})
    client.execute(env=environment)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of execution, which would change the file on every run
    notebook.metadata.language_info.version = "3"
    return notebook


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in names:
        print(name)
        nbformat.write(execute(FOLDER / f"{name}.ipynb"), FOLDER / f"{name}.ipynb")
