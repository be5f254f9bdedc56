"""The scripts of docs/how_to/own_model.md: in one process, and the loop on a mesh under torchrun, print the same."""

import os
import re
import sys
from pathlib import Path

import pytest

from support import programs

PAGE = (Path(__file__).parents[2] / "docs/how_to/own_model.md").read_text()
MODEL, ONE_PROCESS, MESH = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses that one process prints."""
    script = tmp_path_factory.mktemp("own_model") / "train.py"
    script.write_text(MODEL + ONE_PROCESS)
    printed = programs.printed(programs.run([sys.executable, str(script)]))
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


def test_one_process_learns(losses: list[float]) -> None:
    assert len(losses) == 4 and losses[-1] < 1.5  # initially ln(256) = 5.5
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(shown.splitlines()) == 4 and shown.startswith("step 10: loss")


@pytest.mark.slow
def test_four_ranks_print_the_losses_of_one_process(losses: list[float], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MODEL + MESH)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    ranks = programs.printed(programs.run(torchrun, env=os.environ | {"OMP_NUM_THREADS": "1"}))
    on_mesh = [float(loss) for loss in re.findall(r"loss ([\d.]+)", ranks)]
    assert len(on_mesh) == 4
    assert all(abs(one - other) < 0.02 for one, other in zip(losses, on_mesh, strict=True))  # near ties differ
