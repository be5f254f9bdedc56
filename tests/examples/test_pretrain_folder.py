"""The output folder of `examples/pretrain.py`: a full disk, and two runs at once."""

import errno
import os
import signal
from pathlib import Path

import pytest

from pretraining import checkpoint
from support.pretrain_run import InputError, after_step, assert_same, run, saved


def test_a_run_on_a_full_disk_ends_with_one_line_and_can_go_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert run(text, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        after_step(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        run(text, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "synchronize", full_disk)
        with pytest.raises(InputError, match="No space left on device; the old one is intact"):
            run(text, tmp_path / "out", "--resume")
    assert len(saved(tmp_path / "out")["training"]) == 3
    run(text, tmp_path / "out", "--resume")
    assert_same(saved(tmp_path / "whole"), saved(tmp_path / "out"))


def test_a_second_run_in_the_same_folder_is_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a resumed run, which could read a checkpoint that the first run is replacing."""
    refused = []

    def second_run(*arguments: str) -> None:
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
        with pytest.raises(InputError, match=r"cannot write to --out .*/out: another run is writing there"):
            run(text, tmp_path / "out", *arguments)
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
        refused.append(arguments)

    assert run(text, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        after_step(patch, 3, second_run)
        assert run(text, tmp_path / "out") == 0
    with monkeypatch.context() as patch:
        after_step(patch, 9, lambda: second_run("--resume", "--steps", "12"))
        assert run(text, tmp_path / "out", "--resume", "--steps", "10") == 0
    assert refused == [(), ("--resume", "--steps", "12")]
    run(text, tmp_path / "whole", "--resume", "--steps", "10")
    assert_same(saved(tmp_path / "whole"), saved(tmp_path / "out"))
