"""Checkpoints that survive a kill at any moment and a full disk, fit any mesh, and run no code when they are read.

    checkpoint/*.safetensors   tensors: the model, its optimizer, the expert load, the state of the random numbers
    checkpoint/training.json   configuration and losses
    checkpoint/SHA256SUMS      of these files, as `sha256sum` writes and checks them

`torch.distributed.checkpoint` writes the tensors, every rank its part. Its own format is pickled and so can run code
when it is read: the metadata, and everything that is not a tensor. This one has neither.

A new checkpoint is written beside the old one and takes its place by renaming, after it has reached the
disk. In the instant between the two renames the old one is `checkpoint.old`; `recover` puts it back.
"""

import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from pretraining import InputError
from pretraining.ranks import agreed, is_first

Configuration = Mapping[str, str | int | float]
TRAINING, SUMS = "training.json", "SHA256SUMS"
LARGEST_TEXT = 2**27  # bytes of all files that are not elements of tensors: those two, and headers


def prepare(folder: Path) -> None:
    """Raise an `InputError` if something is where a checkpoint, or the one before it, will be."""
    for path in (folder, folder.with_suffix(".new"), folder.with_suffix(".old")):
        if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
            raise InputError(f"cannot write the checkpoint {folder}: {path.name} is not a folder")
    if not folder.parent.is_dir():  # where a link leads
        raise InputError(f"cannot write the checkpoint {folder}: there is no folder {folder.parent}")


def save(folder: Path, state: dict[str, Any], training: dict[str, Any]) -> None:
    """Replace the checkpoint in `folder`, or leave it as it is and raise.

    All ranks call it, and have the folder on the same disk.

    Args:
        folder: the checkpoint; its parent exists.
        state: tensors, in dicts; of a DTensor every rank writes its part.
        training: the rest, of what JSON has; the same on every rank.

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


class ReplacingWriter(dcp.HuggingFaceStorageWriter):
    """Puts a checkpoint in the place of the old one; what fails on one rank fails on all."""

    def __init__(self, folder: Path, training: dict[str, Any]) -> None:
        super().__init__(str(folder.with_suffix(".new")), save_distributed=True)
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

    def finish(self, metadata: dcp.Metadata, results: Any) -> None:
        """Write the rest and replace the old checkpoint: on one rank, after the others have written."""
        write(self.new / TRAINING, json.dumps(self.training).encode())
        sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(self.new.iterdir())]
        write(self.new / SUMS, "".join(sums).encode())
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
        state: as given to `save`; every rank gets its part of a DTensor.

    Returns:
        The rest, as given to `save`.

    Raises:
        InputError: if there is none, it cannot be read or it is of another configuration.
    """
    with agreed():
        if is_first():
            recover(folder)
            if not folder.exists():
                raise InputError(f"nothing to resume: there is no checkpoint {folder}")
            with named(folder):
                verify(folder, size_of(state) + LARGEST_TEXT)
    with agreed(), named(folder):
        training = read_training(folder / TRAINING)
        reader = Reader(folder)
    compare(folder, training["configuration"], configuration)
    try:
        with one_process_will_do():
            dcp.load(state, storage_reader=reader, planner=StrictLoadPlanner())
    except dcp.CheckpointException as failure:
        with named(folder):
            raise cause(failure)  # noqa: B904
    return training


class Reader(dcp.HuggingFaceStorageReader):
    """Reads all headers at once: those that fail within `dcp.load` are printed with a traceback."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.metadata = super().read_metadata()

    def read_metadata(self) -> dcp.Metadata:
        """Return what was read."""
        return self.metadata


class StrictLoadPlanner(dcp.DefaultLoadPlanner):
    """Reads what was saved, whole: without conversions, and without elements that no file has."""

    def create_local_plan(self) -> dcp.LoadPlan:
        """Compare what is there with what is wanted: torch does it for names and shapes."""
        plan = super().create_local_plan()
        for name, wanted in self.state_dict.items():
            there = self.metadata.state_dict_metadata[name]
            if there.properties.dtype != wanted.dtype:
                raise ValueError(f"{name} is {there.properties.dtype} there and {wanted.dtype} here")
            if sum(math.prod(chunk.sizes) for chunk in there.chunks) != wanted.numel():
                raise ValueError(f"{name} is not whole")
        return plan


def verify(folder: Path, at_most: int) -> None:
    """Raise a `ValueError` unless the folder has exactly the files of SHA256SUMS, all as they were written."""
    paths = sorted(folder.iterdir())
    if not os.path.lexists(folder / SUMS):
        raise ValueError(f"it has no {SUMS}")
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path.name} is not a file")
    size = sum(path.stat().st_size for path in paths)
    if size > at_most:
        raise ValueError(f"{size:,} bytes, for this model there are at most {at_most:,}")
    lines = (folder / SUMS).read_text().splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    names = {path.name for path in paths} - {SUMS}
    for name in sorted(names ^ sums.keys()):
        raise ValueError(f"{name} is {'not in' if name in names else 'missing, but in'} {SUMS}")
    for name in sorted(names):
        if sha256(folder / name) != sums[name]:
            raise ValueError(f"{name} was changed: it does not have the hash of {SUMS}")


def read_training(path: Path) -> dict[str, Any]:
    """Read what is not a tensor; raise a `ValueError` where it is something else."""

    def number(value: object) -> bool:
        return type(value) in (int, float) and -1e9 < value < 1e9

    def evaluation(value: object) -> bool:
        return isinstance(value, list) and len(value) == 2 and type(value[0]) is int and number(value[1])

    training = json.loads(path.read_text())
    wanted = {
        "configuration": lambda value: isinstance(value, dict),
        "steps": lambda value: type(value) is int and value > 0,
        "training": lambda value: isinstance(value, list) and value and all(map(number, value)),
        "held_out": lambda value: isinstance(value, list) and all(map(evaluation, value)),
    }
    if not isinstance(training, dict) or training.keys() != wanted.keys():
        raise ValueError(f"{path.name} does not have exactly {', '.join(wanted)}")
    for name, is_right in wanted.items():
        if not is_right(training[name]):
            raise ValueError(f"{path.name} has no proper {name}")
    return training


def compare(folder: Path, saved: Configuration, configuration: Configuration) -> None:
    """Raise an `InputError` that names the first difference."""
    for name, value in configuration.items():
        if saved.get(name) != value:
            raise InputError(
                f"the checkpoint {folder} is of another configuration: "
                f"{name} is {str(saved.get(name))[:100]} there and {value} here"
            )


def size_of(state: dict[str, Any]) -> int:
    """Add the bytes of all tensors, DTensors whole."""
    return sum(
        size_of(value) if isinstance(value, dict) else value.numel() * value.itemsize for value in state.values()
    )


def sha256(path: Path) -> str:
    """Hash a file."""
    result = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            result.update(block)
    return result.hexdigest()


@contextmanager
def named(folder: Path) -> Iterator[None]:
    """Around reading a checkpoint: what goes wrong is an `InputError`, as damaged files fail in many ways."""
    try:
        yield
    except Exception as error:
        raise InputError(f"cannot read the checkpoint {folder}: {in_words(error)}") from error


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
    """Say it in one line, which may be from a damaged file."""
    return (getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0])[:500]


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
