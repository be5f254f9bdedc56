"""`examples/pretrain.py`: whole runs, stopping, and resuming bit for bit, with more steps too."""

import errno
import os
import signal
from pathlib import Path

import pytest

from pretraining import checkpoint
from support.pretrain_run import InputError, after_step, assert_same, run, saved


def test_a_run_leaves_checkpoint_pictures_and_a_report(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(text, tmp_path / "out", looks_at_pictures=True) == 0
    assert "of 8 experts got no token" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"checkpoint", "loss.png", "expert_load.png"}
    state = saved(tmp_path / "out")
    assert len(state["training"]) == 8 and [step for step, _ in state["held_out"]] == [4, 8]
    # Every step routes each of its 2 * 16 tokens to 2 experts, in each of the 2 layers.
    assert (state["load"][:8].sum(-1) == 2 * 16 * 2).all() and not state["load"][8:].any()


def test_it_learns(text: Path, tmp_path: Path) -> None:
    run(text, tmp_path / "out", "--steps", "150", "--eval-every", "150", "--learning-rate", "0.01")
    training = saved(tmp_path / "out")["training"]
    assert training[0] == pytest.approx(8, abs=0.3)
    assert sum(training[-10:]) / 10 < 3.5


def test_bfloat16_stays_close_to_float32(text: Path, tmp_path: Path) -> None:
    run(text, tmp_path / "wide")
    run(text, tmp_path / "narrow", "--dtype", "bfloat16")
    wide, narrow = saved(tmp_path / "wide")["training"], saved(tmp_path / "narrow")["training"]
    assert wide != narrow
    assert narrow == pytest.approx(wide, rel=0.02)


@pytest.mark.parametrize(("number", "optimizer"), [(signal.SIGTERM, "adamw"), (signal.SIGINT, "muon")])
def test_a_signal_saves_and_the_resumed_run_is_the_uninterrupted_one(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, optimizer: str
) -> None:
    assert run(text, tmp_path / "whole", "--optimizer", optimizer) == 0
    before = signal.getsignal(number)
    with after_step(3, lambda: signal.raise_signal(number)):
        assert run(text, tmp_path / "halves", "--optimizer", optimizer) == 128 + number
    assert signal.getsignal(number) == before
    assert "Stopped and saved at step 3. To continue: pretrain.py --resume" in capsys.readouterr().out
    assert len(saved(tmp_path / "halves")["training"]) == 3
    assert run(text, tmp_path / "halves", "--optimizer", optimizer, "--resume") == 0
    assert_same(saved(tmp_path / "whole"), saved(tmp_path / "halves"))


def test_a_run_on_a_full_disk_ends_with_one_line_and_can_go_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert run(text, tmp_path / "whole") == 0
    with after_step(3, lambda: signal.raise_signal(signal.SIGINT)):
        run(text, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "synchronize", full_disk)
        with pytest.raises(InputError, match="No space left on device; the old one is intact"):
            run(text, tmp_path / "out", "--resume")
    assert len(saved(tmp_path / "out")["training"]) == 3
    run(text, tmp_path / "out", "--resume")
    assert_same(saved(tmp_path / "whole"), saved(tmp_path / "out"))


def test_a_finished_run_goes_on_with_more_steps_however_often_it_is_interrupted(text: Path, tmp_path: Path) -> None:
    for out in ("whole", "parts"):
        run(text, tmp_path / out)
    run(text, tmp_path / "whole", "--resume", "--steps", "13")
    for step, arguments in ((10, ["--steps", "13"]), (11, [])):
        with after_step(step, lambda: signal.raise_signal(signal.SIGTERM)):
            assert run(text, tmp_path / "parts", "--resume", *arguments) == 143
    with pytest.raises(InputError, match=r"--steps 4: the run in .*parts has done 11 already"):
        run(text, tmp_path / "parts", "--resume", "--steps", "4")
    assert run(text, tmp_path / "parts", "--resume") == 0
    assert_same(saved(tmp_path / "whole"), saved(tmp_path / "parts"))
