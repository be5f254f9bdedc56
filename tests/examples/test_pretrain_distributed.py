"""`examples/pretrain.py` on several ranks and stages: losses of one process, checkpoints for any mesh, and the end."""

import errno
import os
import re
import signal
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from examples.pretrain_run import EXAMPLES, TINY, InputError, after_step, run, saved
from support.messages import error_of
from support.programs import started, wait_until
from support.run_ranks import run_ranks as run_ranks_in_time

SHORT = ("--batch-size", "4", "--sequence-length", "32", "--steps", "6", "--eval-every", "6")
STRIDED = ("--mesh", "fsdp=2,expert=-1", "--rules", "shard-exp-on-fsdp")
STAGES = ("--mesh", "stage=2", "--num-micro-batches", "2")


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare two checkpoints, up to the rounding of float32."""
    assert one.keys() == other.keys()
    for name in ("training", "held_out"):
        assert torch.tensor(one[name]).allclose(torch.tensor(other[name]), rtol=2e-6, atol=0), name
    for name, value in one.items():
        if name.startswith(("model.", "optimizer.")):
            assert torch.allclose(value, other[name], rtol=1e-3, atol=1e-5), name
    assert torch.equal(one["load"], other["load"])


def messages(text: Path, out: Path, commands: list[list[str]]) -> list[str]:
    """The error message of each command line on this rank."""
    return [error_of(run, text, out, *arguments, kind=InputError) for arguments in commands]


run_ranks = partial(run_ranks_in_time, timeout=60, deadline=180)  # pictures and checkpoints, on a busy machine


def test_a_stopped_run_goes_on_with_any_mesh(text: Path, tmp_path: Path) -> None:
    """Only the last rank gets the signal, and all stop after the same step."""

    def part(step: int | None, *arguments: str) -> int:
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        is_stopped = step is not None and last
        with after_step(step or 0, lambda: signal.raise_signal(signal.SIGTERM)) if is_stopped else nullcontext():
            return run(text, tmp_path / "out", *SHORT, *arguments)

    assert run(text, tmp_path / "whole", *SHORT) == 0
    assert part(1) == 143
    assert run_ranks(part, 4, 2, *STRIDED, "--resume") == [143] * 4
    assert run_ranks(part, 2, 4, *STAGES, "--resume") == [143] * 2
    assert part(None, "--resume") == 0
    assert_close(saved(tmp_path / "whole"), saved(tmp_path / "out"))


def test_bad_input_is_named_on_all_ranks_alike(text: Path, tmp_path: Path) -> None:
    expected = {
        "--mesh fsdp=4": r"the mesh axes \(fsdp=4\) make 4 ranks, and the world has 2",
        "--rules best": "there is no preset 'best', only .*, shard-exp-on-fsdp",
        "--batch-size 3": "--batch-size 3 is not divisible by fsdp=2",
        "--num-experts 5 --mesh expert=2 --rules ep-as-dp": "num_experts must be .*: 5 is not divisible by 2",
        "--schedule gpipe": "--schedule gpipe needs an axis stage in --mesh, such as stage=2",
        "--mesh stage=2 --num-micro-batches 1": r"must be at least the number of stages \(2\) for the schedule '1f1b'",
    }
    together = run_ranks(messages, 2, text, tmp_path / "out", [arguments.split() for arguments in expected])
    assert together[0] == together[1]
    for message, pattern in zip(together[0], expected.values(), strict=True):
        assert re.search(pattern, message) and "\n" not in message
    assert not (tmp_path / "out").exists()


def test_a_full_disk_of_one_rank_ends_all(text: Path, tmp_path: Path) -> None:
    def full_disk(*arguments: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def failing() -> list[str]:
        full = patch.object(dcp.HuggingFaceStorageWriter, "write_data", full_disk)
        with full if dist.get_rank() == 1 else nullcontext():
            return messages(text, tmp_path / "out", [[*SHORT, "--resume"]])

    with after_step(4, lambda: signal.raise_signal(signal.SIGINT)):
        run(text, tmp_path / "out", *SHORT)
    ((first,), (second,)) = run_ranks(failing, 2)
    assert first == second and first.endswith("No space left on device; the old one is intact")
    assert len(saved(tmp_path / "out")["training"]) == 4
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"checkpoint"}


def test_ranks_refuse_a_folder_in_which_another_run_writes(text: Path, tmp_path: Path) -> None:
    """Every rank raises the error; the first run continues."""
    refused: list[list[str]] = []
    out, arguments = tmp_path / "out", [[], ["--resume"]]
    run(text, out, "--steps", "1")
    with after_step(2, lambda: refused.extend(run_ranks(messages, 2, text, out, arguments))):
        assert run(text, out, "--resume", "--steps", "2") == 0
    assert refused == [[f"cannot write to --out {out}: another run is writing there"] * 2] * 2


@pytest.mark.slow  # test_pretrain.py interrupts a run without torchrun
def test_an_interrupt_saves(text: Path, tmp_path: Path) -> None:
    options = ("--steps", "5000", "--eval-every", "5000", "--save-every", "2")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    script = [str(EXAMPLES / "pretrain.py"), *TINY, "--data", str(text), "--out", str(tmp_path / "out"), *options]
    with started([sys.executable, *torchrun, *script]) as finish:
        wait_until((tmp_path / "out/checkpoint").exists)
        done = finish(signal.SIGINT)
    step = len(saved(tmp_path / "out")["training"])
    assert f"Stopped and saved at step {step}. To continue: torchrun --nproc-per-node 1 {EXAMPLES}/" in done.stdout
