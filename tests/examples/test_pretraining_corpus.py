"""The text that `examples/pretrain.py` reads: files, split, sequences."""

from pathlib import Path

import pytest
import torch

from pretraining import corpus


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
    for folder in ("one", "other"):
        (text / folder).mkdir()
        (text / folder / "name.txt").write_text("the same name below two folders")
    assert len(corpus.read_texts(corpus.named_files([str(text / "one"), str(text / "other")]))) == 2


def test_the_standard_library_is_taken_without_tests_and_packages() -> None:
    names = [Path(name) for name, _ in corpus.standard_library_files()]
    assert {Path("os.py"), Path("asyncio/events.py")} <= set(names)
    assert not any({"test", "site-packages", "encodings"} & set(name.parts) for name in names)


def test_the_split_is_by_file_and_does_not_depend_on_the_order(text: Path) -> None:
    texts = corpus.read_texts(corpus.named_files([str(text)]))
    training, held_out = corpus.split_by_file(texts)
    assert corpus.split_by_file(texts[::-1]) == (training, held_out)
    parts = training.split(b"\0")[1:] + held_out.split(b"\0")[1:]
    assert sorted(parts) == sorted(content for _, content in texts)
    assert held_out.count(b"\0") == 1  # a tenth of twelve files
    assert corpus.split_by_file([("one", bytes(range(1, 101)))]) == (
        b"\0" + bytes(range(1, 91)),
        b"\0" + bytes(range(91, 101)),
    )


@pytest.mark.parametrize("size", [17, 100, 16 * 40, 16 * 1000 + 5, 1_000_000])
def test_evaluation_pieces_are_whole_sequences_spread_over_the_text(size: int) -> None:
    text = bytes(value % 251 for value in range(size))
    pieces = corpus.evaluation_pieces(text, 16)
    assert (pieces.shape[1] - 1) % 16 == 0 and pieces.numel() <= 16 * (8192 + 1)
    for piece in pieces:
        assert piece.numpy().tobytes() in text
    assert pieces[0, 0] == text[0]
    if size > 16 * 17:
        assert len(pieces) == 16 and pieces[-1, -1] == text[-1]
        assert len({piece.numpy().tobytes() for piece in pieces}) > 1


@pytest.mark.parametrize("size", [17, 40, 16 * 9 + 3])
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
        assert {start % 16 for start in starts} == {starts[0] % 16}
        epochs.append(starts)
    assert size < 100 or epochs[0] != epochs[1]
