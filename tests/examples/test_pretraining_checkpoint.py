"""Checkpoints of `examples/pretrain.py`: complete, whenever the process ends, and checked before they are used."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pretraining import InputError, checkpoint, integrity

TENSORS = "shard-00001-model-00001-of-00001.safetensors"
TRAINING: dict[str, Any] = {"configuration": {}, "steps": 1, "training": [7.5], "held_out": [[1, 7.25]]}


def save(folder: Path, value: float) -> None:
    checkpoint.save(folder, {"model": {"weight": torch.full((4096,), value)}}, TRAINING)


def loaded(folder: Path) -> float:
    """The value in a checkpoint, which must be whole, as a new process finds it."""
    checkpoint.prepare(folder)
    state = {"model": {"weight": torch.zeros(4096)}}
    assert checkpoint.load(folder, {}, state) == TRAINING
    (value,) = state["model"]["weight"].unique()
    return float(value)


class Killed(BaseException):
    """The end of a process, after which it changes nothing."""


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after every call that changes the disk."""
    found, moment, left, died = set(), 0, 0, True

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            for action in (lambda: None, lambda: function(*arguments, **options)):
                if left < 0:
                    raise Killed
                result = action()
                left -= 1
            return result

        return call

    while died:
        folder, left = tmp_path / str(moment) / "checkpoint", moment
        folder.parent.mkdir()
        save(folder, 1.0)
        with monkeypatch.context() as patch, suppress(Killed):
            for owner, name in ((Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (os, "fsync")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
            save(folder, 2.0)
            died = False
        found.add(loaded(folder))
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
        moment += 1
    assert moment > 20 and found == {1.0, 2.0}


def changed(folder: Path) -> None:
    data = bytearray((folder / TENSORS).read_bytes())
    data[-1] ^= 1
    (folder / TENSORS).write_bytes(data)


def of_another_model(folder: Path) -> None:
    shutil.rmtree(folder)
    checkpoint.save(folder, {"model": {"other": torch.ones(3)}}, TRAINING)


def with_training(text: str) -> Callable[[Path], None]:
    """A change of training.json with its checksum, as whoever writes a foreign checkpoint makes it."""

    def write(folder: Path) -> None:
        (folder / "training.json").write_text(text)
        sums = "".join(f"{digest}  {name}\n" for name, digest in integrity.checksums(folder).items())
        (folder / "SHA256SUMS").write_text(sums)

    return write


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed, f"{TENSORS} was changed"),
        (lambda folder: (folder / TENSORS).unlink(), f"{TENSORS} is missing, but in SHA256SUMS"),
        (of_another_model, "Missing key in checkpoint state_dict: model.weight"),
        (with_training(json.dumps({**TRAINING, "training": [float("nan")]})), "training.json has an invalid training"),
        (with_training(str(pickle.dumps(TRAINING))), "Expecting value"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_named(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    save(tmp_path / "checkpoint", 1.0)
    damage(tmp_path / "checkpoint")
    with pytest.raises(InputError, match=f"cannot read the checkpoint .*{message}"):
        loaded(tmp_path / "checkpoint")
