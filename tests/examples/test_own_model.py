"""The scripts of docs/how_to/own_model.md: in one process, and the loop on a mesh under torchrun, print the same."""

import functools
import io
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from support import programs

PAGE = (Path(__file__).parents[2] / "docs/how_to/own_model.md").read_text()
MODEL, ONE_PROCESS, MESH = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@functools.cache
def losses_of_one_process() -> list[float]:
    with redirect_stdout(io.StringIO()) as stream:
        exec(MODEL + ONE_PROCESS, {"__name__": "__main__"})
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", stream.getvalue())]


def test_one_process_learns() -> None:
    losses = losses_of_one_process()
    assert len(losses) == 4 and losses[-1] < 1.5  # initially ln(256) = 5.5
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(shown.splitlines()) == 4 and shown.startswith("step 10: loss")


@pytest.mark.slow
def test_four_ranks_print_the_losses_of_one_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MODEL + MESH)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    ranks = programs.printed(programs.run(torchrun, env=os.environ | {"OMP_NUM_THREADS": "1"}))
    on_mesh = [float(loss) for loss in re.findall(r"loss ([\d.]+)", ranks)]
    assert on_mesh == pytest.approx(losses_of_one_process(), abs=0.02)  # near ties differ
