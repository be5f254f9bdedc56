"""`examples/train_minimal.py`: it learns, and two ranks print the losses of one process."""

import io
import os
import re
from contextlib import redirect_stdout
from unittest.mock import patch

import train_minimal
from support.pretrain_run import EXAMPLES
from support.run_ranks import run_ranks

SIZES = {"STEPS_PER_LINE": 5, "BATCH": 4, "LENGTH": 16, "WIDTH": 16}


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


def test_it_is_short_enough_to_copy() -> None:
    assert len((EXAMPLES / "train_minimal.py").read_text().splitlines()) < 80


def test_it_needs_nothing_but_torch_and_maxmoe() -> None:
    text = (EXAMPLES / "train_minimal.py").read_text()
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if re.match(r"(from|import) ", line)}
    assert imported == {"os", "sysconfig", "pathlib", "torch", "maxmoe"}
