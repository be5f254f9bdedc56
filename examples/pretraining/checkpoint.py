"""Checkpoints that survive a kill at any moment and a full disk, and fit any mesh.

    checkpoint/*.distcp, .metadata   the model and its optimizer, as `torch.distributed.checkpoint` writes them
    checkpoint/training.pt           everything else that the next step depends on

A new checkpoint is written beside the old one and takes its place by renaming, after it has reached the
disk. In the instant between the two renames the old one is `checkpoint.old`; `recover` puts it back.
"""

import io
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from pretraining import InputError
from pretraining.ranks import agreed, is_first

Configuration = Mapping[str, str | int | float]


def save(folder: Path, state: dict[str, Any], training: dict[str, Any]) -> None:
    """Replace the checkpoint in `folder`, or leave it as it is and raise.

    All ranks call it, and have the folder on the same disk.

    Args:
        folder: the checkpoint; its parent exists.
        state: of model and optimizer; of a DTensor every rank writes its part.
        training: the rest, of tensors, numbers, strings, lists and dicts; the same on every rank.

    Raises:
        InputError: if the new checkpoint cannot be written.
    """
    try:
        with one_process_will_do():
            dcp.save(state, storage_writer=ReplacingWriter(folder, training))
    except dcp.CheckpointException as failure:
        error = cause(failure)
        if is_first():
            shutil.rmtree(folder.with_suffix(".new"), ignore_errors=True)
            recover(folder)
        kept = "; the old one is intact" if folder.exists() else ""
        raise InputError(f"cannot write the checkpoint {folder}: {in_words(error)}{kept}") from error


class ReplacingWriter(dcp.FileSystemWriter):
    """Puts a checkpoint in the place of the old one; what fails on one rank fails on all."""

    def __init__(self, folder: Path, training: dict[str, Any]) -> None:
        super().__init__(folder.with_suffix(".new"), sync_files=True)
        self.folder = folder
        self.new, self.old = folder.with_suffix(".new"), folder.with_suffix(".old")
        self.training = training

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Leave the folder as it is: all ranks share it."""
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Make an empty folder: on one rank, before the others write."""
        recover(self.folder)
        shutil.rmtree(self.new, ignore_errors=True)
        self.new.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write the part of this rank."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # of the archive, in the place of what the system said
            raise error.__context__ or error from None

    def finish(self, metadata: dcp.Metadata, results: Any) -> None:
        """Write the rest and replace the old checkpoint: on one rank, after the others have written."""
        stream = io.BytesIO()
        torch.save(self.training, stream)
        write(self.new / "training.pt", stream.getvalue())
        super().finish(metadata, results)
        synchronize(self.new)
        if self.folder.exists():
            self.folder.rename(self.old)
        self.new.rename(self.folder)
        synchronize(self.folder.parent)
        shutil.rmtree(self.old, ignore_errors=True)


def load(folder: Path, configuration: Configuration, state: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint of the same configuration, written on any mesh.

    Args:
        folder: the checkpoint.
        configuration: of this run, compared with `training["configuration"]`.
        state: of model and optimizer; every rank gets its part of a DTensor.

    Returns:
        The rest, as given to `save`.

    Raises:
        InputError: if there is none, it cannot be read or it is of another configuration.
    """
    with agreed():
        if is_first():
            recover(folder)
    with agreed():
        training = load_training(folder, configuration)
    try:
        with one_process_will_do():
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    except dcp.CheckpointException as failure:
        error = cause(failure)
        raise InputError(f"cannot read the checkpoint {folder}: {in_words(error)}") from error
    return training


def load_training(folder: Path, configuration: Configuration) -> dict[str, Any]:
    """Read what is not in the state of model and optimizer, and compare the configurations."""
    if not folder.exists():
        raise InputError(f"nothing to resume: there is no checkpoint {folder}")
    try:
        training: dict[str, Any] = torch.load(folder / "training.pt", weights_only=True)
    except Exception as error:  # truncated and foreign files fail in many ways
        raise InputError(f"cannot read the checkpoint {folder}: {in_words(error)}") from error
    saved = training["configuration"]
    for name, value in configuration.items():
        if saved.get(name) != value:
            raise InputError(
                f"the checkpoint {folder} is of another configuration: "
                f"{name} is {saved.get(name)} there and {value} here"
            )
    return training


@contextmanager
def one_process_will_do() -> Iterator[None]:
    """Without other ranks, torch warns of saving and loading without them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def cause(failure: dcp.CheckpointException) -> Exception:
    """Find what went wrong on the first rank where something did."""
    error = failure.failures[min(failure.failures)][0]
    if not isinstance(error, Exception):  # Ctrl-C, too, comes as a failure
        raise error
    return error


def in_words(error: Exception) -> str:
    """Say it in one line."""
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]


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
