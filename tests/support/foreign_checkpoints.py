"""Small checkpoints of `examples/pretrain.py`, and attacks on them."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from pretraining import checkpoint


def small_state(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((4, 6), value)}, "optimizer": {"step": torch.tensor(value)}}


def save_small(folder: Path, value: float) -> None:
    training = {"configuration": {"seed": 0}, "steps": 2, "training": [value, 7.5], "held_out": [(2, 7.25)]}
    checkpoint.save(folder, small_state(value), training)


def add_sums(folder: Path) -> None:
    """Write SHA256SUMS as its author would: whoever changes the files can change it, too."""
    files = [path for path in folder.iterdir() if path.name != "SHA256SUMS"]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


class CreateFolder:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)
