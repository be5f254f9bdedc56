"""Checkpoints that survive a kill at any moment and a full disk.

    checkpoint/model.safetensors   the weights
    checkpoint/training.pt         everything else that the next step depends on

A new checkpoint is written beside the old one and takes its place by renaming, after it has reached the
disk. In the instant between the two renames the old one is `checkpoint.old`; `recover` puts it back.
"""

import io
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from pretraining import InputError

Configuration = Mapping[str, str | int | float]


def save(folder: Path, weights: dict[str, Tensor], training: dict[str, Any]) -> None:
    """Replace the checkpoint in `folder`, or leave it as it is and raise.

    Args:
        folder: the checkpoint; its parent exists.
        weights: state dict of the model.
        training: the rest, of tensors, numbers, strings, lists and dicts.

    Raises:
        InputError: if the new checkpoint cannot be written.
    """
    new, old = folder.with_suffix(".new"), folder.with_suffix(".old")
    recover(folder)
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        stream = io.BytesIO()
        torch.save(training, stream)
        write(new / "model.safetensors", safetensors.torch.save(weights))
        write(new / "training.pt", stream.getvalue())
        synchronize(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        synchronize(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        recover(folder)
        kept = "; the old one is intact" if folder.exists() else ""
        raise InputError(f"cannot write the checkpoint {folder}: {error.strerror}{kept}") from error


def load(folder: Path, configuration: Configuration) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint of the same configuration.

    Args:
        folder: the checkpoint.
        configuration: of this run, compared with `training["configuration"]`.

    Returns:
        Weights and the rest, as given to `save`.

    Raises:
        InputError: if there is none, it cannot be read or it is of another configuration.
    """
    recover(folder)
    if not folder.exists():
        raise InputError(f"nothing to resume: there is no checkpoint {folder}")
    try:
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        training = torch.load(folder / "training.pt", weights_only=True)
    except Exception as error:  # truncated and foreign files fail in many ways
        raise InputError(f"cannot read the checkpoint {folder}: {str(error).splitlines()[0]}") from error
    saved = training["configuration"]
    for name, value in configuration.items():
        if saved.get(name) != value:
            raise InputError(
                f"the checkpoint {folder} is of another configuration: "
                f"{name} is {saved.get(name)} there and {value} here"
            )
    return weights, training


def recover(folder: Path) -> None:
    """Finish or undo a replacement that was cut short between its two renames."""
    old = folder.with_suffix(".old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def write(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def synchronize(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
