"""Runs of `examples/pretrain.py` that last a moment, and what they leave."""

import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import pretrain
from pretraining import InputError as InputError

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = [
    *("--hidden-size", "16", "--num-layers", "2", "--num-heads", "2", "--num-experts", "4", "--top-k", "2"),
    *("--intermediate-size", "8", "--batch-size", "2", "--sequence-length", "16"),
    *("--steps", "8", "--eval-every", "4"),
]
OPTIONS = Namespace(
    hidden_size=8, num_layers=2, num_heads=1, num_experts=4, top_k=2, intermediate_size=4, batch_size=3,
    sequence_length=16, steps=8, learning_rate=0.01, seed=0, dtype="float32", mesh="fsdp=-1",
    rules="default",
)  # fmt: skip


def words(folder: Path) -> Path:
    """Make a folder with twelve files of words."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    for index in range(12):
        numbers = torch.randint(0, 50, (200,), generator=generator).tolist()
        (folder / f"{index}.txt").write_text(" ".join(f"word{number}" for number in numbers))
    return folder


def run(text: Path, out: Path, *arguments: str) -> int:
    options = pretrain.parse_options([*TINY, "--data", str(text), "--out", str(out), *arguments])
    with patch.object(pretrain, "SAMPLE_BYTES", 4):
        return pretrain.run(options, ["pretrain.py"])


def saved(out: Path) -> dict[str, Any]:
    """Everything in the checkpoint, flat, so that two of them can be compared bit for bit."""
    training: dict[str, Any] = torch.load(out / "checkpoint/training.pt", weights_only=True)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.pt"
        dcp_to_torch_save(out / "checkpoint", whole)
        state = torch.load(whole, weights_only=True)
    weights, moments = state["model"], state["optimizer"]["state"]
    assert weights.keys() - {name for name in weights if name.endswith("score_correction_bias")} == moments.keys()
    flat = {f"weights.{name}": value for name, value in weights.items()}
    for name, state in moments.items():
        flat |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return flat | training


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, name


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Let something happen while a step is under way."""
    original = pretrain.Trainer.train_step

    def train_step(trainer: pretrain.Trainer) -> Any:
        output = original(trainer)
        if trainer.step == step:
            action()
        return output

    monkeypatch.setattr(pretrain.Trainer, "train_step", train_step)
