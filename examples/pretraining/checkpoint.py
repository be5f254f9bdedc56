"""Checkpoints that stay whole when a run is killed or the disk is full, load on any mesh, and run no code when read.

    checkpoint/*.safetensors   tensors: model, optimizer state, expert load, state of the random number generator
    checkpoint/training.json   configuration and losses
    checkpoint/SHA256SUMS      checksums of the other files, for `sha256sum --check`

`torch.distributed.checkpoint` (DCP) writes and reads the tensors, each rank its shards. Its default format contains
pickles, which can run code when they are read. Safetensors contain only numbers.

A new checkpoint is written to `checkpoint.new`. When all of it is on the disk, `checkpoint` is renamed to
`checkpoint.old` and `checkpoint.new` to `checkpoint`. If a run is killed in between, `prepare` undoes the first rename.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from pretraining import InputError
from pretraining.integrity import SUMS, TRAINING, check_files, check_tensors, checksums, compare, read_training, sizes
from pretraining.ranks import agreed, is_first, of_all

FILE_BYTES = 2**28  # largest size of the tensors in one file


def save(folder: Path, state: dict[str, Any], training: dict[str, Any]) -> None:
    """Replace the checkpoint in `folder`. All ranks call it, after `prepare`, and share the folder.

    Args:
        folder: the checkpoint.
        state: tensors in nested dicts. Each rank writes its shards of the DTensors.
        training: the contents of `training.json`, the same on every rank.

    Raises:
        InputError: if the new checkpoint cannot be written; the old one is kept.
    """
    new, action = folder.with_suffix(".new"), f"cannot write the checkpoint {folder}"
    try:
        with readable_errors(action):
            files = file_numbers(of_all(sizes(state)))
            dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(new), files, save_distributed=True))
        with readable_errors(action):
            if is_first():
                (new / TRAINING).write_text(json.dumps(training))
                (new / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in checksums(new).items()))
                replace(folder, new)
    except InputError as error:
        if is_first():
            recover(folder)
        raise InputError(f"{error}; the old one is intact" if folder.exists() else str(error)) from error


def file_numbers(num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of the file of each tensor, from 1, given their sizes.

    A rank copies its part of a file twice before it writes it, so that large checkpoints need several files.
    """
    numbers, number, size = {}, 1, 0
    for name, added in num_bytes.items():
        if size and size + added > FILE_BYTES:
            number, size = number + 1, 0
        numbers[name], size = number, size + added
    return numbers


def replace(folder: Path, new: Path) -> None:
    """Put the folder `new` in the place of `folder`, after everything in it has reached the disk."""
    for path in (*new.iterdir(), new):
        synchronize(path)
    if folder.exists():
        folder.rename(folder.with_suffix(".old"))
    new.rename(folder)
    synchronize(folder.parent)
    recover(folder)


def prepare(folder: Path) -> None:
    """Undo or complete a save that was interrupted; raise an `InputError` if no checkpoint can be written."""
    for path in (folder, folder.with_suffix(".new"), folder.with_suffix(".old")):
        if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
            raise InputError(f"cannot write the checkpoint {folder}: {path.name} is not a folder")
    if not folder.parent.is_dir():  # `folder` may be the target of a symbolic link
        raise InputError(f"cannot write the checkpoint {folder}: there is no folder {folder.parent}")
    if is_first():
        recover(folder)


def recover(folder: Path) -> None:
    """Restore the old checkpoint if the new one has not replaced it; delete the folders that a save leaves."""
    new, old = folder.with_suffix(".new"), folder.with_suffix(".old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)


def find(folder: Path) -> None:
    """Raise an `InputError` if there is no checkpoint to resume from."""
    if not folder.exists() and not folder.with_suffix(".old").exists():
        raise InputError(f"nothing to resume: there is no checkpoint {folder}")


def load(folder: Path, configuration: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint, written on any mesh by any number of ranks. All ranks call it, after `prepare`.

    Args:
        folder: the checkpoint.
        configuration: configuration of this run, which must equal the configuration in the checkpoint.
        state: tensors to fill, with the names and shapes of the tensors given to `save`. Each rank reads its shards of
        the DTensors.

    Returns:
        The contents of `training.json`.

    Raises:
        InputError: if the checkpoint cannot be read or has another configuration.
    """
    action, reader = f"cannot read the checkpoint {folder}", dcp.HuggingFaceStorageReader(str(folder))
    num_bytes = sum(of_all(sizes(state)).values())  # a rank has the tensors of its pipeline stages only
    with readable_errors(action):
        if is_first():
            check_files(folder, num_bytes)
    with readable_errors(action):
        training = read_training(folder / TRAINING)
        compare(folder, training["configuration"], configuration)
        check_tensors(reader.read_metadata(), state)
    with readable_errors(action):
        dcp.load(state, storage_reader=reader)
    return training


@contextmanager
def readable_errors(action: str) -> Iterator[None]:
    """Raise the error of any rank on all ranks, as an `InputError` of one line that begins with `action`."""
    with agreed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except (Exception, dcp.CheckpointException) as error:
            cause = error.failures[min(error.failures)][0] if isinstance(error, dcp.CheckpointException) else error
            if isinstance(cause, InputError) or not isinstance(cause, Exception):  # DCP also wraps KeyboardInterrupt
                raise cause from None
            reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
            raise InputError(f"{action}: {reason.splitlines()[0][:500]}") from cause


def synchronize(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
