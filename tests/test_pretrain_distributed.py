"""`examples/pretrain.py` on several ranks: the losses of one process, checkpoints for every mesh, and its end."""

import io
import signal
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pretrain_run import after_step, run, saved, words
from run_ranks import run_ranks as run_ranks_in_time

SHORT = ("--batch-size", "4", "--sequence-length", "32", "--steps", "5", "--eval-every", "5")
STRIDED = ("--mesh", "fsdp=2,expert=-1", "--rules", "shard-exp-on-fsdp")
TENSOR_PARALLEL = ("--mesh", "data=2,expert=2", "--rules", "ep-tp")
CUT_SEQUENCES = ("--mesh", "expert=2", "--rules", "ep-as-cp")


run_ranks = partial(run_ranks_in_time, timeout=60, deadline=180)  # pictures and checkpoints, on a busy machine


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return words(tmp_path / "text")


def printed(text: Path, out: Path, *arguments: str) -> str:
    """What a run prints on this rank, but for the folder."""
    with redirect_stdout(io.StringIO()) as stream:
        assert run(text, out, *SHORT, *arguments) == 0
    return stream.getvalue().replace(str(out), "")


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two checkpoints say the same, up to the rounding of float32."""
    assert one.keys() == other.keys()
    for name in ("training", "held_out"):
        assert torch.tensor(one[name]).allclose(torch.tensor(other[name]), rtol=2e-6, atol=0), name
    for name, value in one.items():
        if name.startswith(("weights.", "optimizer.")):
            assert torch.allclose(value, other[name], rtol=1e-3, atol=1e-5), name
    assert torch.equal(one["tokens_per_expert"], other["tokens_per_expert"])


# The same numbers


@pytest.mark.parametrize("arguments", [STRIDED, TENSOR_PARALLEL, CUT_SEQUENCES], ids=lambda words: words[-1])
def test_ranks_compute_what_one_process_computes(text: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    alone = printed(text, tmp_path / "alone")
    world_size = 2 if arguments is CUT_SEQUENCES else 4
    together = run_ranks(printed, world_size, text, tmp_path / "together", *arguments)
    assert together == [alone] * world_size  # the sample too
    assert_close(saved(tmp_path / "alone"), saved(tmp_path / "together"))


def test_a_stopped_run_goes_on_with_any_mesh(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last rank gets the signal, and all stop after the same step."""

    def part(step: int | None, *arguments: str) -> int:
        with monkeypatch.context() as patch:
            if step is not None:
                last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
                after_step(patch, step, lambda: signal.raise_signal(signal.SIGTERM) if last else None)
            return run(text, tmp_path / "out", *SHORT, *arguments)

    assert run(text, tmp_path / "whole", *SHORT) == 0
    assert part(1) == 143
    assert run_ranks(part, 4, 2, *STRIDED, "--resume") == [143] * 4
    assert run_ranks(part, 2, 3, *CUT_SEQUENCES, "--resume") == [143] * 2
    assert part(None, "--resume") == 0
    assert_close(saved(tmp_path / "whole"), saved(tmp_path / "out"))
