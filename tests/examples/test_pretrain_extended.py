"""`examples/pretrain.py --resume --steps N`: resumed runs with more or fewer steps."""

import signal
from pathlib import Path

import pytest
import torch

from pretraining import corpus, trainer
from support.pretrain_run import TINY, InputError, after_step, assert_same, pretrain, run, saved


def test_an_extended_run_is_the_same_however_often_it_is_interrupted(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for out in ("whole", "parts"):
        run(text, tmp_path / out)
    run(text, tmp_path / "whole", "--resume", "--steps", "13")
    assert "Resumed at step 8 of 13" in capsys.readouterr().out
    for step, arguments in ((10, ["--steps", "13"]), (11, [])):
        with monkeypatch.context() as patch:
            after_step(patch, step, lambda: signal.raise_signal(signal.SIGTERM))
            assert run(text, tmp_path / "parts", "--resume", *arguments) == 143
    assert run(text, tmp_path / "parts", "--resume") == 0
    assert "Resumed at step 11 of 13" in capsys.readouterr().out
    assert_same(saved(tmp_path / "whole"), saved(tmp_path / "parts"))


def test_an_extended_run_follows_the_schedule_of_all_its_steps(text: Path, tmp_path: Path) -> None:
    """The schedule is recomputed from the resumed step on; earlier steps keep their rates."""
    run(text, tmp_path / "out")
    first = saved(tmp_path / "out")
    run(text, tmp_path / "out", "--resume", "--steps", "12")
    longer = saved(tmp_path / "out")

    arguments = ["--data", str(text), "--out", str(tmp_path / "out")]
    options = pretrain.parse_options([*TINY, *arguments])
    by_hand = trainer.Trainer(options, corpus.load_corpus(options.data, options.sequence_length))
    rates = []
    for step in range(12):
        by_hand.steps = 8 if step < 8 else 12
        by_hand.train_step()
        rates.append(by_hand.optimizer.param_groups[0]["lr"])
    assert rates[7] < 0.2 * 3e-3 and rates[8:] == [trainer.learning_rate(step, 12, 3e-3) for step in range(8, 12)]
    assert longer["training"] == by_hand.history.training and longer["training"][:8] == first["training"]
    assert [step for step, _ in longer["held_out"]] == [4, 8, 12]
    assert torch.equal(longer["load"][:8], first["load"][:8]) and longer["steps"] == 12
    for name, parameter in by_hand.model.state_dict().items():
        assert torch.equal(parameter, longer[f"model.{name}"]), name


def test_a_run_can_be_shortened_but_not_below_what_is_done(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        after_step(patch, 5, lambda: signal.raise_signal(signal.SIGTERM))
        run(text, tmp_path / "out")
    with pytest.raises(InputError, match=r"--steps 4: the run in .*out has done 5 already"):
        run(text, tmp_path / "out", "--resume", "--steps", "4")
    assert run(text, tmp_path / "out", "--resume", "--steps", "5") == 0
    assert (tmp_path / "out/loss.png").exists()
