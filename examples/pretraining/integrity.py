"""Checks that a checkpoint must pass before it is used. It may be damaged or come from an untrusted source."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pretraining import InputError
from pretraining.command import LARGEST_INT

TRAINING, SUMS = "training.json", "SHA256SUMS"
MAX_TEXT_BYTES = 2**27  # total size of training.json, SHA256SUMS and the headers of the safetensors


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder, by name, except for SHA256SUMS itself."""
    sums = {}
    for path in sorted(folder.iterdir()):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        sums[path.name] = digest.hexdigest()
    sums.pop(SUMS, None)
    return sums


def check_files(folder: Path, num_bytes: int) -> None:
    """Raise a `ValueError` unless a checkpoint of `num_bytes` has exactly the files of its SHA256SUMS, unchanged."""
    for path in folder.iterdir():
        if not path.is_file():  # reading a pipe would wait for a writer
            raise ValueError(f"{path.name} is not a file")
    size = sum(path.stat().st_size for path in folder.iterdir())
    max_bytes = num_bytes + MAX_TEXT_BYTES
    if size > max_bytes:
        raise ValueError(f"{size:,} bytes, for this model there are at most {max_bytes:,}")
    if not (folder / SUMS).exists():
        raise ValueError(f"it has no {SUMS}")
    lines = (folder / SUMS).read_text().splitlines()
    found, listed = checksums(folder), {line[66:]: line[:64] for line in lines}
    for name in sorted(found.keys() ^ listed.keys()):
        raise ValueError(f"{name} is {'not in' if name in found else 'missing, but in'} {SUMS}")
    for name, digest in found.items():
        if digest != listed[name]:
            raise ValueError(f"{name} was changed: it does not have the hash of {SUMS}")


def check_tensors(metadata: Metadata, state: dict[str, Any]) -> None:
    """Raise a `ValueError` for faults that `dcp.load` accepts: a different dtype, and a gap between shards."""
    for name, tensor in named_tensors(state):
        saved = metadata.state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            raise ValueError(f"Missing key in checkpoint state_dict: {name}")
        if saved.properties.dtype != tensor.dtype:
            raise ValueError(f"{name} must be {tensor.dtype}, got {saved.properties.dtype}")
        if sum(chunk.sizes.numel() for chunk in saved.chunks) != saved.size.numel():
            raise ValueError(f"parts of {name} are missing")


def named_tensors(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts, each with its name in the checkpoint."""
    for name, value in state.items():
        if isinstance(value, dict):
            yield from named_tensors(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def sizes(state: dict[str, Any]) -> dict[str, int]:
    """Return the size of each tensor in bytes, over all ranks of a DTensor."""
    return {name: tensor.numel() * tensor.itemsize for name, tensor in named_tensors(state)}


def read_training(path: Path) -> dict[str, Any]:
    """Read `training.json`; raise a `ValueError` that names the file, the field and the value that cannot be used."""

    def check(field: str, value: object, usable: bool) -> None:
        if not usable:
            raise ValueError(f"{path.name} has an invalid {field}: {str(value)[:100]}")

    def is_step(value: object) -> bool:
        return type(value) is int and 0 < value <= LARGEST_INT

    def is_loss(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 < value < 1e9

    training, fields = json.loads(path.read_text()), ("configuration", "steps", "training", "held_out")
    if not isinstance(training, dict) or training.keys() != set(fields):
        raise ValueError(f"{path.name} does not have exactly {', '.join(fields)}")
    configuration, steps, losses, held_out = (training[field] for field in fields)
    check("configuration", configuration, isinstance(configuration, dict))
    check("steps", steps, is_step(steps))
    check("training", losses, isinstance(losses, list) and losses != [])
    check("held_out", held_out, isinstance(held_out, list))
    for loss in losses:
        check("training", loss, is_loss(loss))
    for pair in held_out:
        check("held_out", pair, isinstance(pair, list) and len(pair) == 2 and is_step(pair[0]) and is_loss(pair[1]))
    return training


def compare(folder: Path, saved: Mapping[str, Any], configuration: Mapping[str, Any]) -> None:
    """Raise an `InputError` that names the first value of `configuration` that differs in the checkpoint."""
    for name, value in configuration.items():
        if saved.get(name) != value:
            raise InputError(
                f"the checkpoint {folder} has another configuration: "
                f"{name} is {str(saved.get(name))[:100]} in the checkpoint and {value} in this run"
            )
