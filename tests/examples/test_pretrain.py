"""`examples/pretrain.py`: whole runs, stopping, and resuming bit for bit, with more steps too."""

import signal
from pathlib import Path

import pytest
import torch

from examples.pretrain_run import InputError, after_step, assert_same, run, saved
from pretraining import corpus


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


def test_an_interrupt_saves_and_the_resumed_run_is_the_uninterrupted_one(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(text, tmp_path / "whole", "--optimizer", "muon") == 0
    before = signal.getsignal(signal.SIGINT)
    with after_step(3, lambda: signal.raise_signal(signal.SIGINT)):
        assert run(text, tmp_path / "halves", "--optimizer", "muon") == 128 + signal.SIGINT
    assert signal.getsignal(signal.SIGINT) == before
    assert "Stopped and saved at step 3. To continue: pretrain.py --resume" in capsys.readouterr().out
    assert len(saved(tmp_path / "halves")["training"]) == 3
    assert run(text, tmp_path / "halves", "--optimizer", "muon", "--resume") == 0
    assert_same(saved(tmp_path / "whole"), saved(tmp_path / "halves"))


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


# Texts


def test_files_folders_and_patterns(text: Path) -> None:
    def names(*data: str) -> list[str]:
        return [path.name for _, path in corpus.named_files(list(data))]

    (text / "deeper/__pycache__").mkdir(parents=True)
    (text / "deeper/12.txt").write_text("x" * 100)
    (text / "deeper/__pycache__/13.txt").touch()
    assert sorted(names(str(text))) == sorted(f"{index}.txt" for index in range(13))
    assert names(str(text / "1?.txt")) == ["10.txt", "11.txt"]
    assert names(str(text / "**/12.txt"), str(text / "3.txt")) == ["12.txt", "3.txt"]
    twice = corpus.read_texts(corpus.named_files([str(text / "3.txt"), str(text / "*3.txt")]))
    assert len(twice) == 1
    library = [Path(name) for name, _ in corpus.standard_library_files()]
    assert {Path("os.py"), Path("asyncio/events.py")} <= set(library)
    assert not any({"test", "site-packages", "encodings"} & set(name.parts) for name in library)


def test_the_split_is_by_file_and_does_not_depend_on_the_order(text: Path) -> None:
    texts = corpus.read_texts(corpus.named_files([str(text)]))
    training, held_out = corpus.split_by_file(texts)
    assert corpus.split_by_file(texts[::-1]) == (training, held_out)
    parts = training.split(b"\0")[1:] + held_out.split(b"\0")[1:]
    assert sorted(parts) == sorted(content for _, content in texts)
    assert held_out.count(b"\0") == 1  # a tenth of twelve files


@pytest.mark.parametrize("size", [17, 16 * 9 + 3])
def test_an_epoch_reads_every_sequence_once(size: int) -> None:
    text = torch.arange(size).to(torch.uint8)
    sequences = corpus.TrainingSequences(text, sequence_length=16, batch_size=1, seed=3)
    epochs = []
    for epoch in range(2):
        starts = []
        for step in range(epoch * sequences.num_sequences, (epoch + 1) * sequences.num_sequences):
            tokens, targets = sequences.batch(step)
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
            starts.append(int(tokens[0, 0]))
            assert torch.equal(tokens[0], torch.arange(starts[-1], starts[-1] + 16))
        assert len(set(starts)) == sequences.num_sequences
        epochs.append(starts)
    assert size < 100 or epochs[0] != epochs[1]
