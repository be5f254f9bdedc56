"""Untrusted checkpoints: reading one runs no code, does not block, and reports an error in one line."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from pretraining import InputError, checkpoint
from support.foreign_checkpoints import CreateFolder, add_sums, save_small, small_state

TENSORS = "shard-00001-model-00001-of-00001.safetensors"


def load(folder: Path) -> dict[str, Any]:
    state = small_state(0.0)
    checkpoint.load(folder, {"seed": 0}, state)
    return state


def refused(folder: Path) -> str:
    with pytest.raises(InputError, match="cannot read the checkpoint") as error:
        load(folder)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_small(tmp_path / "checkpoint", 1.0)
    return tmp_path / "checkpoint"


def test_a_small_one_loads(folder: Path) -> None:
    assert torch.equal(load(folder)["model"]["weight"], small_state(1.0)["model"]["weight"])


@pytest.mark.parametrize("name", [TENSORS, "training.json", "SHA256SUMS"])
@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_a_pickle_in_the_place_of_a_file_does_nothing(folder: Path, tmp_path: Path, name: str, write: Any) -> None:
    with (folder / name).open("wb") as file:
        write(CreateFolder(tmp_path / "created"), file)
    if name != "SHA256SUMS":
        add_sums(folder)
    refused(folder)
    assert not (tmp_path / "created").exists()


def test_files_of_other_checkpoints_are_not_read(folder: Path, tmp_path: Path) -> None:
    """Checkpoints in the format of `torch.distributed.checkpoint`, which are pickles."""
    for name in (".metadata", "__0_0.distcp", "training.pt"):
        (folder / name).write_bytes(pickle.dumps(CreateFolder(tmp_path / "created")))
    refused(folder)
    add_sums(folder)
    load(folder)
    assert not (tmp_path / "created").exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert (tmp_path / "created").exists()


GOOD = {"configuration": {"seed": 0}, "steps": 1, "training": [1.0], "held_out": [[1, 2.0]]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "does not have exactly configuration, steps, training, held_out"),
        ("{}", "does not have exactly"),
        (json.dumps({**GOOD, "more": 1}), "does not have exactly"),
        (json.dumps({**GOOD, "configuration": [1]}), "an invalid configuration"),
        (json.dumps({**GOOD, "steps": 0}), "an invalid steps"),
        (json.dumps({**GOOD, "steps": True}), "an invalid steps"),
        (json.dumps({**GOOD, "training": []}), "an invalid training"),
        (json.dumps({**GOOD, "training": [[1.0]]}), "an invalid training"),
        (json.dumps({**GOOD, "training": [float("nan")]}), "an invalid training"),
        (json.dumps({**GOOD, "training": [10**400]}), "an invalid training"),
        (json.dumps({**GOOD, "steps": 10**400}), f"training.json has an invalid steps: 1{'0' * 90}"),
        (json.dumps({**GOOD, "held_out": [1.0]}), "an invalid held_out"),
        (json.dumps({**GOOD, "held_out": [[1.0, 2.0]]}), "an invalid held_out"),
        (json.dumps({**GOOD, "held_out": [[1, 2.0], [10**400, 2.0]]}), "training.json has an invalid held_out: [1000"),
        (json.dumps({**GOOD, "training": [1.0, 10**400]}), f"training.json has an invalid training: 1{'0' * 90}"),
        ("[" * 100_000, "recursion"),
        ("9" * 5000, "4300"),
        ("\x80", "utf-8"),
    ],
    ids=range(19),
)
def test_training_of_other_shapes_is_named(folder: Path, text: str, message: str) -> None:
    (folder / "training.json").write_bytes(text.encode("latin-1"))
    add_sums(folder)
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "Missing key in checkpoint state_dict: model.weight"),
        ({"model.weight": torch.zeros(4, 5)}, "Size mismatch"),
        ({"model.weight": torch.zeros(4)}, "Size mismatch"),
        (
            {"model.weight": torch.zeros(4, 6, dtype=torch.float64)},
            "must be torch.float32, got torch.float64",
        ),
        (
            {"model.weight": torch.zeros(4, 6, dtype=torch.bfloat16)},
            "must be torch.float32, got torch.bfloat16",
        ),
    ],
    ids=range(5),
)
def test_other_tensors_are_named(folder: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    safetensors.torch.save_file({"optimizer.step": torch.tensor(1.0), **tensors}, folder / TENSORS)
    add_sums(folder)
    assert message in refused(folder)


def test_a_tensor_with_a_hole_is_named(folder: Path) -> None:
    """Parts that contain the end of a tensor, but not all of it."""
    sharding = {"model.weight": {"saved_offsets": [2, 0]}, "optimizer.step": {"saved_offsets": []}}
    safetensors.torch.save_file(
        {"model.weight": torch.ones(2, 6), "optimizer.step": torch.tensor(1.0)},
        folder / TENSORS,
        metadata={"DCP_SHARDING_INFO": json.dumps(sharding)},
    )
    add_sums(folder)
    assert "parts of model.weight are missing" in refused(folder)


@pytest.mark.parametrize("name", [TENSORS, "training.json", "SHA256SUMS"])
def test_what_is_not_a_file_is_not_opened(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"{name} is not a file" in refused(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert f"{name} is not a file" in refused(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    assert f"{name} is not a file" in refused(folder)


def test_a_file_that_is_too_large_is_not_read(folder: Path) -> None:
    os.truncate(folder / "training.json", 2**40)
    assert "1,099,511,6" in refused(folder)


def test_files_that_are_missing_or_more_are_named(folder: Path) -> None:
    (folder / "more").touch()
    assert "more is not in SHA256SUMS" in refused(folder)
    (folder / "more").unlink()
    (folder / TENSORS).unlink()
    assert f"{TENSORS} is missing, but in SHA256SUMS" in refused(folder)
    (folder / "SHA256SUMS").unlink()
    assert refused(folder).endswith("it has no SHA256SUMS")


def test_a_changed_value_is_noticed(folder: Path) -> None:
    data = bytearray((folder / TENSORS).read_bytes())
    data[-1] ^= 1
    (folder / TENSORS).write_bytes(data)
    assert f"{TENSORS} was changed" in refused(folder)


def test_a_name_stays_on_its_line(folder: Path) -> None:
    (folder / "\x1b[2J\nmore").touch()
    assert refused(folder).endswith(r": \x1b[2J")
