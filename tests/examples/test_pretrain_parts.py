"""The parts of `examples/pretrain.py`: text, baselines, checkpoints, pictures and schedules."""

import math
import os
import resource
import shutil
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pretraining import InputError, baselines, checkpoint, corpus, figures, trainer

OPTIONS = Namespace(
    hidden_size=8, num_layers=2, num_heads=1, num_experts=4, top_k=2, intermediate_size=4, batch_size=3,
    sequence_length=16, steps=8, learning_rate=0.01, seed=0, dtype="float32", mesh="fsdp=-1",
    rules="ep-as-dp",
)  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with twelve files of two hundred words."""
    for index in range(12):
        words = torch.randint(0, 50, (200,)).tolist()
        (tmp_path / f"{index}.txt").write_text(" ".join(f"word{word}" for word in words))
    return tmp_path


# Text and baselines


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

    def loss(tokens: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        real = targets[:, 0] >= 0  # the last batch is filled up
        tokens, targets = tokens[real], targets[real]
        seen.append(bytes(targets.flatten().tolist()))
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        return torch.tensor(2 * math.log(2)) * targets.numel(), None

    monkeypatch.setattr(run, "loss", loss)
    assert run.evaluate() == pytest.approx(2)
    assert b"".join(seen) == content


def test_a_step_reads_its_batch_and_records_its_load(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 250  # more than there are windows, so that some share one
    run = trainer.Trainer(Namespace(**{**vars(OPTIONS), "steps": steps}), corpus.load_corpus([str(text)], 16))
    batch, read = run.sequences.batch, []
    monkeypatch.setattr(run.sequences, "batch", lambda step: read.append(step) or batch(step))
    biases = [torch.zeros(4) for _ in run.model.moe_layers()]
    total = torch.zeros(2, 4, dtype=torch.int64)
    for step in range(6):
        counts = run.train_step().tokens_per_expert
        total += counts
        assert run.optimizer.param_groups[0]["lr"] == trainer.learning_rate(step, steps, 0.01)
        for layer, bias, count in zip(run.model.moe_layers(), biases, counts.float(), strict=True):
            bias += layer.config.correction_bias_update_rate * (count.mean() - count).sign()
            torch.testing.assert_close(layer.router.score_correction_bias, bias)
    assert read == list(range(6))
    assert torch.equal(run.history.tokens_per_expert.sum(0), total)
    assert run.history.tokens_per_expert[:3].sum((1, 2)).tolist() == [3 * 192, 2 * 192, 192]


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [trainer.learning_rate(step, 200, 1.0) for step in range(200)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=1e-3)
    assert trainer.learning_rate(0, 1, 1.0) == 1.0


def test_decay_is_for_matrices_only() -> None:
    model = trainer.build_model(OPTIONS)
    decayed, others = trainer.build_optimizer(model, 0.1).param_groups
    assert all(parameter.ndim >= 2 for parameter in decayed["params"]) and decayed["weight_decay"] > 0
    assert all(parameter.ndim < 2 for parameter in others["params"]) and others["weight_decay"] == 0
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize(("layers", "experts", "windows"), [(1, 3, 1), (3, 8, 20), (4, 16, 100)])
def test_pictures_of_any_number_of_layers(tmp_path: Path, layers: int, experts: int, windows: int) -> None:
    counts = torch.randint(0, 9, (windows, layers, experts))
    figures.expert_load(tmp_path / "load.png", counts, 300)
    figures.loss_curves(tmp_path / "loss.png", [8.0], [(1, 3.0)], {"byte bigram": 3.5})
    assert (tmp_path / "load.png").stat().st_size > 5000 and (tmp_path / "loss.png").stat().st_size > 5000


# Checkpoints


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((4096,), value)}


def loaded(folder: Path) -> float:
    """The value in a checkpoint, which must be whole."""
    state = state_of(0.0)
    assert checkpoint.load(folder, {}, state)["value"] == float(state["weight"][0])
    assert len(state["weight"].unique()) == 1
    return float(state["weight"][0])


def save(folder: Path, value: float) -> None:
    checkpoint.save(folder, state_of(value), {"configuration": {}, "value": value})


def save_and_die(folder: Path, value: float, moment: int) -> int:
    """Save in a process of its own, which ends before or after one of the calls that change the disk."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    torch.set_num_threads(1)  # those of OpenMP are not forked, and waiting for them hangs
    left = moment

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            for action in (lambda: None, lambda: function(*arguments, **options)):
                result = action()
                left -= 1
                if left == -1:
                    os._exit(9)
            return result

        return call

    changes = [(Path, "mkdir"), (checkpoint, "write"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")]
    for owner, name in changes:
        setattr(owner, name, counted(getattr(owner, name)))
    code = 1
    try:
        save(folder, value)
        code = 0
    finally:
        os._exit(code)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    """Every call that changes the disk is the last one once: before it has begun, and after it has ended."""
    found, moment, code = set(), 0, 9
    while code == 9:
        folder = tmp_path / str(moment) / "checkpoint"
        folder.parent.mkdir()
        save(folder, 1.0)
        code = save_and_die(folder, 2.0, moment)
        found.add(loaded(folder))
        save(folder, 3.0)
        assert loaded(folder) == 3
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
        moment += 1
    assert code == 0 and moment > 20 and found == {1.0, 2.0}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """What a full disk does: writing goes so far and then fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 1000, 20_000, 410_000])
def test_a_failing_write_leaves_the_old_checkpoint(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, 1.0)
    large = {"large": torch.zeros(100_000)}
    with (
        largest_file(size),
        pytest.raises(InputError, match=r"cannot write the checkpoint .*: File too large; the old one is intact"),
    ):
        checkpoint.save(folder, large, {"configuration": {}, **large, "more": torch.zeros(10_000)})
    assert loaded(folder) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_second_interrupt_ends_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path, data: bytes) -> None:
        raise KeyboardInterrupt

    save(tmp_path / "checkpoint", 1.0)
    monkeypatch.setattr(checkpoint, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "checkpoint", 2.0)
    assert loaded(tmp_path / "checkpoint") == 1
