"""The scripts of docs/how_to/own_model.md: in one process, and the loop on a mesh under torchrun, print the same."""

import os
import re
import sys
from pathlib import Path

import pytest

from support import programs

PAGE = (Path(__file__).parents[2] / "docs/how_to/own_model.md").read_text()
MODEL, ONE_PROCESS, MESH = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("num_lines", [1, pytest.param(4, marks=pytest.mark.sampled(0))])
def test_four_ranks_print_the_losses_of_one_process(tmp_path: Path, num_lines: int) -> None:
    """The ranks take all 40 steps or the first 10 of them."""
    script = tmp_path / "train.py"
    script.write_text(MODEL + ONE_PROCESS)
    alone = programs.printed(programs.run([sys.executable, str(script)]))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", alone)]
    assert len(losses) == 4 and losses[-1] < 1.5  # initially ln(256) = 5.5
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(shown.splitlines()) == 4 and shown.startswith("step 10: loss")

    assert "range(1, 41)" in MESH
    script.write_text(MODEL + MESH.replace("range(1, 41)", f"range(1, {10 * num_lines + 1})"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    ranks = programs.printed(programs.run(torchrun, env=os.environ | {"OMP_NUM_THREADS": "1"}))
    on_mesh = [float(loss) for loss in re.findall(r"loss ([\d.]+)", ranks)]
    assert len(on_mesh) == num_lines
    for one, other in zip(losses[:num_lines], on_mesh, strict=True):
        assert abs(one - other) < 0.02  # near ties differ
