"""Checkpoints of `examples/pretrain.py`: complete, whenever the process ends, and read without running code."""

import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from maxmoe.parallel import RankError
from pretraining import InputError, checkpoint
from support.foreign_checkpoints import CreateFolder, add_sums, save_small, small_state
from support.run_ranks import run_alone

TENSORS = "shard-00001-model-00001-of-00001.safetensors"


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((4096,), value)}


def training_of(*losses: float) -> dict[str, Any]:
    return {"configuration": {}, "steps": 1, "training": list(losses), "held_out": []}


def loaded(folder: Path) -> float:
    """The value in a checkpoint, which must be whole, as a new process finds it."""
    checkpoint.prepare(folder)
    state = state_of(0.0)
    assert checkpoint.load(folder, {}, state) == training_of(float(state["weight"][0]))
    assert len(state["weight"].unique()) == 1
    return float(state["weight"][0])


def save(folder: Path, value: float) -> None:
    checkpoint.save(folder, state_of(value), training_of(value))


# Writing


def test_a_large_state_is_written_to_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is larger than the limit, unless it has one tensor."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100)
    state = {name: torch.randn(size) for name, size in {"a": 10, "b": 30, "c": 3}.items()}  # of 4 bytes
    checkpoint.save(tmp_path / "checkpoint", {**state, "nested": {"d": state["a"] + 1}}, training_of(1.0))
    assert len([*(tmp_path / "checkpoint").glob("*.safetensors")]) > 2
    read: dict[str, Any] = {**{name: 0 * value for name, value in state.items()}, "nested": {"d": 0 * state["a"]}}
    checkpoint.load(tmp_path / "checkpoint", {}, read)
    assert all(torch.equal(read[name], value) for name, value in state.items())
    assert torch.equal(read["nested"]["d"], state["a"] + 1)


def save_and_die(folder: Path, value: float, moment: int) -> None:
    """Save in a new process, which ends before or after one of the calls that change the disk."""
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

    changes = [(Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")]
    for owner, name in changes:
        setattr(owner, name, counted(getattr(owner, name)))
    save(folder, value)


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    """The process is killed before and after every call that changes the disk."""
    found, moment, died = set(), 0, True
    while died:
        folder = tmp_path / str(moment) / "checkpoint"
        folder.parent.mkdir()
        save(folder, 1.0)
        died = False
        try:
            run_alone(save_and_die, folder, 2.0, moment)
        except RankError as error:
            died = "it died: exit code 9" in str(error)
        found.add(loaded(folder))
        save(folder, 3.0)
        assert loaded(folder) == 3
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
        moment += 1
    assert moment > 20 and found == {1.0, 2.0}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A limit at which writes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 410_000])
def test_a_failing_write_leaves_the_old_checkpoint(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, 1.0)
    large = {"large": torch.zeros(100_000)}
    with (
        largest_file(size),
        pytest.raises(InputError, match=r"cannot write the checkpoint .*: File too large; the old one is intact"),
    ):
        checkpoint.save(folder, large, training_of(*[1.5] * 100_000))
    assert loaded(folder) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint.old"])
def test_what_is_in_the_place_of_a_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("not to be lost")
    with pytest.raises(InputError, match=rf"cannot write the checkpoint .*: {name} is not a folder"):
        checkpoint.prepare(tmp_path / "checkpoint")
    assert (tmp_path / name).read_text() == "not to be lost"


# Reading


def refused(folder: Path) -> str:
    with pytest.raises(InputError, match="cannot read the checkpoint") as error:
        checkpoint.load(folder, {"seed": 0}, small_state(0.0))
    assert str(error.value).isprintable() and len(str(error.value)) < 1000
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_small(tmp_path / "checkpoint", 1.0)
    checkpoint.load(tmp_path / "checkpoint", {"seed": 0}, small_state(0.0))
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("name", [TENSORS, "training.json"])
@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_a_pickle_in_the_place_of_a_file_does_nothing(folder: Path, tmp_path: Path, name: str, write: Any) -> None:
    with (folder / name).open("wb") as file:
        write(CreateFolder(tmp_path / "created"), file)
    add_sums(folder)
    refused(folder)
    assert not (tmp_path / "created").exists()


GOOD = {"configuration": {"seed": 0}, "steps": 1, "training": [1.0], "held_out": [[1, 2.0]]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{}", "does not have exactly configuration, steps, training, held_out"),
        (json.dumps({**GOOD, "steps": True}), "an invalid steps"),
        (json.dumps({**GOOD, "training": [float("nan")]}), "an invalid training"),
        (json.dumps({**GOOD, "held_out": [[1.0, 2.0]]}), "an invalid held_out"),
        ("[" * 100_000, "recursion"),
    ],
    ids=range(6),
)
def test_training_of_other_shapes_is_named(folder: Path, text: str, message: str) -> None:
    (folder / "training.json").write_text(text)
    add_sums(folder)
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("tensors", "saved_offsets", "message"),
    [
        ({}, None, "Missing key in checkpoint state_dict: model.weight"),
        ({"model.weight": torch.zeros(4, 5)}, None, "Size mismatch"),
        ({"model.weight": torch.zeros(4, 6).double()}, None, "must be torch.float32, got torch.float64"),
        ({"model.weight": torch.ones(2, 6)}, [2, 0], "parts of model.weight are missing"),
    ],
    ids=range(4),
)
def test_other_tensors_are_named(
    folder: Path, tensors: dict[str, torch.Tensor], saved_offsets: list[int] | None, message: str
) -> None:
    parts = {"model.weight": {"saved_offsets": saved_offsets}, "optimizer.step": {"saved_offsets": []}}
    metadata = None if saved_offsets is None else {"DCP_SHARDING_INFO": json.dumps(parts)}
    safetensors.torch.save_file({"optimizer.step": torch.tensor(1.0), **tensors}, folder / TENSORS, metadata)
    add_sums(folder)
    assert message in refused(folder)


def test_a_folder_that_was_changed_is_named(folder: Path) -> None:
    data = bytearray((folder / TENSORS).read_bytes())
    data[-1] ^= 1
    (folder / TENSORS).write_bytes(data)
    assert f"{TENSORS} was changed" in refused(folder)
    (folder / "more").touch()
    assert "more is not in SHA256SUMS" in refused(folder)
    (folder / "more").unlink()
    (folder / TENSORS).unlink()
    assert f"{TENSORS} is missing, but in SHA256SUMS" in refused(folder)
    os.mkfifo(folder / TENSORS)  # reading it would wait for a writer
    assert f"{TENSORS} is not a file" in refused(folder)
