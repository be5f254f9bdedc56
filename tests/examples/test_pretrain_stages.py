"""`examples/pretrain.py` in pipeline stages: the losses of one process, also after a resumption on another mesh."""

import io
import os
import signal
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from maxmoe.parallel import RankError
from maxmoe.pipelining.stage import Stage
from support.pretrain_run import after_step, assert_close, messages, pretrain, run, saved
from support.run_ranks import run_ranks as run_ranks_in_time

SHORT = ("--batch-size", "8", "--num-layers", "4", "--save-every", "2", "--eval-every", "6")
EXPERTS = ["--mesh", "stage=2,expert=2", "--schedule", "1f1b", "--num-micro-batches", "4"]
FOUR = ["--mesh", "stage=4", "--schedule", "gpipe", "--num-micro-batches", "8"]
ONE = ["--mesh", "stage=1,expert=2", "--schedule", "gpipe", "--num-micro-batches", "2"]
FSDP = ["--mesh", "stage=2,fsdp=2", "--schedule", "interleaved_1f1b", "--num-micro-batches", "2"]

run_ranks = partial(run_ranks_in_time, timeout=60, deadline=180)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "optimizer"), [(EXPERTS, "adamw"), (FSDP, "muon")], ids=["adamw, experts", "muon, FSDP2"]
)
def test_stages_compute_what_one_process_computes(text: Path, tmp_path: Path, mesh: list[str], optimizer: str) -> None:
    options = (*SHORT, "--steps", "2", "--optimizer", optimizer)

    def printed(out: str, *arguments: str) -> str:
        with redirect_stdout(io.StringIO()) as stream:
            assert run(text, tmp_path / out, *options, *arguments) == 0
        return stream.getvalue().replace(str(tmp_path / out), "")

    alone = printed("alone")
    together = run_ranks(printed, 4, "together", *mesh)
    assert_close(saved(tmp_path / "alone"), saved(tmp_path / "together"))
    before, _, after = alone.partition("Sample")
    assert all(text.startswith(before) and text.endswith(after.partition("\n\n")[2]) for text in together)
    assert "No sample: no rank has the whole model" in together[0]
    assert "Sample, after 64 held-out bytes" in printed("together", "--resume")


@pytest.mark.slow
def test_a_run_whose_ranks_die_or_hang_in_a_stage_goes_on_with_other_numbers_of_stages(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other ranks name the rank; the checkpoint resumes with 2, 4 and 1 stages, and without stages."""
    out, options = tmp_path / "out", (*SHORT, "--steps", "12")
    assert run(text, tmp_path / "whole", *options) == 0

    def failing(rank: int, number: int, call: int, *arguments: str) -> int:
        """Send a signal to a rank in one of the calls of its stage."""
        original, calls = Stage.forward, 0

        def forward(stage: Stage, *inputs: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call and dist.get_rank() == rank:
                os.kill(os.getpid(), number)
            return original(stage, *inputs, **options)

        monkeypatch.setattr(Stage, "forward", forward)
        monkeypatch.setattr(pretrain.ranks, "PATIENCE", timedelta(seconds=1))
        monkeypatch.setattr(pretrain.ranks, "TIMEOUT", timedelta(seconds=6))
        try:
            return run(text, out, *options, *arguments)
        except RankError as error:
            (tmp_path / f"{dist.get_rank()}.error").write_text(str(error))
            raise

    def fail(rank: int, *arguments: Any) -> None:
        with pytest.raises(RuntimeError):
            run_ranks(failing, 4, rank, *arguments)
        paths = list(tmp_path.glob("*.error"))
        errors = {int(path.stem): path.read_text() for path in paths}
        for path in paths:
            path.unlink()
        assert errors.keys() == {*range(4)} - {rank}
        assert all(error.startswith(f"rank {rank} of 4 died or hangs: no heartbeat") for error in errors.values())

    def stopping(step: int, *arguments: str) -> int:
        after_step(monkeypatch, step, lambda: signal.raise_signal(signal.SIGTERM))
        return run(text, out, *options, *arguments)

    fail(3, signal.SIGKILL, 4 * 2 + 2, *EXPERTS)  # with four micro-batches: in the third step
    assert len(saved(out)["training"]) == 2
    fail(1, signal.SIGSTOP, 8 * 2 + 5, *FOUR, "--resume")  # with eight: in the fifth step
    assert len(saved(out)["training"]) == 4
    assert run_ranks(stopping, 2, 9, *ONE, "--resume") == [143] * 2
    assert run(text, out, *options, "--resume") == 0
    assert_close(saved(tmp_path / "whole"), saved(out))


def test_what_a_pipeline_cannot_run_is_named_on_all_ranks_alike(text: Path, tmp_path: Path) -> None:
    stages = "--mesh stage=2 --num-layers 2 --schedule"
    expected = {
        "--schedule gpipe": "--schedule gpipe needs an axis stage in --mesh, such as stage=2",
        "--mesh fsdp=2 --num-micro-batches 2": "--num-micro-batches 2 needs an axis stage in --mesh, such as stage=2",
        "--mesh stage=2": "--mesh stage=2 --rules default: the axis stage needs --num-micro-batches",
        "--mesh stage=2 --num-micro-batches 3": "--batch-size 2 is not divisible by --num-micro-batches 3",
        "--mesh stage=1,expert=2 --num-micro-batches 2": "2 is not divisible by expert=2 * --num-micro-batches 2",
        "--mesh stage=3 --num-micro-batches 2": "the mesh axes (stage=3) make 3 ranks, and the world has 2",
        "--mesh stage=2 --num-micro-batches 2 --schedule 1f1d": f"{stages} 1f1d --num-micro-batches 2: schedule must "
        "be one of 'gpipe', '1f1b', 'looped_bfs', 'interleaved_1f1b', 'interleaved_zero_bubble', 'zbv', 'dual_pipe_v', "
        "got '1f1d'; the nearest are '1f1b'",
        "--mesh stage=2 --num-micro-batches 1": f"{stages} 1f1b --num-micro-batches 1: num_micro_batches must be at "
        "least the number of stages (2) for the schedule '1f1b', got 1",
        "--mesh stage=2 --num-micro-batches 2 --schedule zbv": f"{stages} zbv --num-micro-batches 2: the model must "
        "have a block for each of the 4 stages, got 2 blocks",
    }
    together = run_ranks(messages, 2, text, tmp_path / "out", [arguments.split() for arguments in expected])
    assert together[0] == together[1]
    for message, end in zip(together[0], expected.values(), strict=True):
        assert message.endswith(end) and "\n" not in message
    alone = "--mesh stage=1 --rules default: the axis stage needs torchrun"
    assert messages(text, tmp_path / "out", [["--mesh", "stage=1", "--num-micro-batches", "2"]]) == [alone]
    assert not (tmp_path / "out").exists()
