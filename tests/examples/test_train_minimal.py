"""`examples/train_minimal.py`: it learns, and two ranks print the losses of one process."""

import io
import os
import re
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

import train_minimal
from examples.pretrain_run import EXAMPLES
from support.run_ranks import run_ranks

SIZES: dict[str, Any] = {"STEPS_PER_LINE": 5, "BATCH": 4, "LENGTH": 16, "WIDTH": 16}


def printed(steps: int, is_launched: bool = False) -> str:
    """The output of a short run of a narrow model on this rank, whose process group exists already."""
    with (
        patch.multiple(train_minimal, STEPS=steps, **SIZES),
        patch.object(train_minimal.dist, "is_torchelastic_launched", lambda: is_launched),
        patch.object(train_minimal.dist, "init_process_group"),
        redirect_stdout(io.StringIO()) as stream,
    ):
        train_minimal.main()
    return stream.getvalue()


def printed_under_torchrun(steps: int) -> str:
    os.environ["RANK"] = str(train_minimal.dist.get_rank())
    return printed(steps, is_launched=True)


def test_two_ranks_print_the_losses_of_one_process() -> None:
    alone = printed(30)
    assert float(re.findall(r"loss ([\d.]+)", alone)[-1]) < 4.5  # initially ln(256) = 5.5
    lines = alone.splitlines(keepends=True)
    assert len(lines) == 6
    assert run_ranks(printed_under_torchrun, 2, 10) == ["".join(lines[:2]), ""]


def test_it_can_be_copied() -> None:
    text = (EXAMPLES / "train_minimal.py").read_text()
    assert len(text.splitlines()) < 80
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if re.match(r"(from|import) ", line)}
    assert imported == {"os", "sysconfig", "pathlib", "torch", "maxmoe"}
