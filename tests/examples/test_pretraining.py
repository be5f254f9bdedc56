"""The parts of `examples/pretrain.py`: text and learning rate."""

from pathlib import Path

import pytest
import torch

from pretraining import corpus, trainer


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


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [trainer.learning_rate(step, 200, 1.0) for step in range(200)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=1e-3)
    assert trainer.learning_rate(0, 1, 1.0) == 1.0
