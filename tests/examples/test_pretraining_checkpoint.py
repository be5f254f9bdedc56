"""The checkpoints of `examples/pretrain.py`: complete, whenever the process ends or the disk is full."""

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from maxmoe.parallel import RankError
from pretraining import InputError, checkpoint
from support.run_ranks import run_alone


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


def test_a_large_state_is_written_to_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is larger than the limit, unless it has one tensor."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100)
    sizes = {"a": 10, "b": 30, "c": 3, "nested.d": 25, "nested.e": 1}  # in numbers of 4 bytes
    values = {name.split(".")[-1]: torch.randn(size) for name, size in sizes.items()}
    a, b, c, d, e = values.values()
    state = {"a": a, "b": b, "c": c, "nested": {"d": d, "e": e}}
    checkpoint.save(tmp_path / "checkpoint", state, training_of(1.0))
    found = sorted(path.name for path in (tmp_path / "checkpoint").glob("*.safetensors"))
    assert found == [f"shard-00001-model-0000{number}-of-00005.safetensors" for number in range(1, 6)]
    read = {"a": 0 * a, "b": 0 * b, "c": 0 * c, "nested": {"d": 0 * d, "e": 0 * e}}
    checkpoint.load(tmp_path / "checkpoint", {}, read)
    assert all(torch.equal(read[name], values[name]) for name in "abc")
    assert all(torch.equal(read["nested"][name], values[name]) for name in "de")
    assert checkpoint.file_numbers({"a": 60, "b": 40, "c": 1}) == {"a": 1, "b": 1, "c": 2}


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


@pytest.mark.parametrize("size", [0, 1000, 20_000, 410_000])
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


def test_a_second_interrupt_ends_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    save(tmp_path / "checkpoint", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "synchronize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "checkpoint", 2.0)
    assert loaded(tmp_path / "checkpoint") == 1


def test_a_checkpoint_may_be_a_link_to_a_folder_elsewhere(tmp_path: Path) -> None:
    """The target of the link is replaced."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/checkpoint").symlink_to(tmp_path / "disk/checkpoint")
    for value in (1.0, 2.0, 3.0):
        folder = Path(os.path.realpath(tmp_path / "out/checkpoint"))
        checkpoint.prepare(folder)
        save(folder, value)
        assert loaded(folder) == value
    assert (tmp_path / "out/checkpoint").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint.new", "checkpoint.old"])
def test_what_is_in_the_place_of_a_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("not to be lost")
    with pytest.raises(InputError, match=rf"cannot write the checkpoint .*: {name} is not a folder"):
        checkpoint.prepare(tmp_path / "checkpoint")
    assert (tmp_path / name).read_text() == "not to be lost"


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no folder .*nowhere"):
        checkpoint.prepare(tmp_path / "nowhere/checkpoint")
