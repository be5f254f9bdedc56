"""The parts of `examples/pretrain.py`: text, steps, baselines."""

import math
import zlib
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pretraining import baselines, corpus, trainer
from support.pretrain_run import OPTIONS

# Text


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


@pytest.mark.parametrize("size", [17, 16 * 40, 1_000_000])
def test_evaluation_pieces_are_whole_sequences_spread_over_the_text(size: int) -> None:
    text = bytes(value % 251 for value in range(size))
    pieces = corpus.evaluation_pieces(text, 16)
    assert (pieces.shape[1] - 1) % 16 == 0 and pieces.numel() <= 16 * (8192 + 1)
    assert all(piece.numpy().tobytes() in text for piece in pieces)
    assert pieces[0, 0] == text[0]
    if size > 16 * 17:
        assert len(pieces) == 16 and pieces[-1, -1] == text[-1]


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


# Steps


def test_a_step_reads_its_batch_and_records_its_load(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 250
    run = trainer.Trainer(Namespace(**{**vars(OPTIONS), "steps": steps}), corpus.load_corpus([str(text)], 16))
    batch, read = run.sequences.batch, []

    def reading(step: int) -> tuple[Tensor, Tensor]:
        read.append(step)
        return batch(step)

    monkeypatch.setattr(run.sequences, "batch", reading)
    total = torch.zeros(2, 4, dtype=torch.int64)
    for step in range(6):
        total += torch.stack([layer.tokens_per_expert for layer in run.train_step().layers.values()])
        assert run.optimizer.param_groups[0]["lr"] == trainer.learning_rate(step, steps, 0.01)
    assert read == list(range(6))
    load = run.state()["load"]
    assert torch.equal(load.sum(0), total)
    assert load.sum((1, 2)).tolist() == [192] * 6 + [0] * 94


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [trainer.learning_rate(step, 200, 1.0) for step in range(200)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=1e-3)
    assert trainer.learning_rate(0, 1, 1.0) == 1.0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_options_of_parameters(optimizer: str) -> None:
    """Decay is for matrices only; Muon is for the matrices of blocks, and changes nothing for the others."""
    model = trainer.build_model(OPTIONS)
    groups = trainer.build_optimizer(model, Namespace(**{**vars(OPTIONS), "optimizer": optimizer})).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = {names[id(parameter)]: group for group in groups for parameter in group["params"]}
    assert chosen.keys() == set(names.values())
    for name, parameter in model.named_parameters():
        group, is_adamw = chosen[name], parameter.ndim < 2 or not name.startswith("blocks.") or "router" in name
        assert group.get("algorithm") in (None, "adamw" if is_adamw else "muon"), name
        assert group["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0.0) and group["lr"] == 0.01, name
        assert group.get("betas", (0.9, 0.95)) == (0.9, 0.95)


# Baselines


def test_bigram_counts_pairs() -> None:
    training = torch.tensor([*b"abacab"], dtype=torch.uint8)
    pieces = torch.tensor([[*b"aba"], [*b"zac"]], dtype=torch.uint8)
    # a is followed by b twice and c once, b once by a, z by nothing; one more for each of the 256 bytes.
    probabilities = [3 / 259, 2 / 257, 1 / 256, 2 / 259]
    expected = -sum(math.log2(probability) for probability in probabilities) / 4
    assert baselines.bigram_bits_per_byte(training, pieces) == pytest.approx(expected, rel=1e-12)


def test_model_and_baselines_measure_the_same_bytes(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = corpus.load_corpus([str(text)], 16)
    content = b"".join(bytes(piece[1:]) for piece in loaded.held_out.tolist())
    assert baselines.zlib_bits_per_byte(loaded.held_out) == 8 * len(zlib.compress(content, 9)) / len(content)
    run = trainer.Trainer(OPTIONS, loaded)
    seen = []

    def evaluate(tokens: Tensor, targets: Tensor, num_tokens: int) -> Tensor:
        real = targets[:, 0] >= 0  # the last batch is filled up
        tokens, targets = tokens[real], targets[real]
        seen.append(bytes(targets.flatten().tolist()))
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        return torch.tensor(2 * math.log(2)) * targets.numel() / num_tokens

    monkeypatch.setattr(run.computation, "evaluate", evaluate)
    assert run.evaluate() == pytest.approx(2)
    assert b"".join(seen) == content
