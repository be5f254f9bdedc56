"""Short runs of `examples/pretrain.py`, and the files that they write."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import pretrain
from pretraining import InputError as InputError
from pretraining import figures

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = [
    *("--hidden-size", "16", "--num-layers", "2", "--num-heads", "2", "--num-experts", "4", "--top-k", "2"),
    *("--intermediate-size", "8", "--batch-size", "2", "--sequence-length", "16"),
    *("--steps", "8", "--eval-every", "4"),
]


def words(folder: Path) -> Path:
    """Make a folder with twelve files of words."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    for index in range(12):
        numbers = torch.randint(0, 50, (80,), generator=generator).tolist()
        (folder / f"{index}.txt").write_text(" ".join(f"word{number}" for number in numbers))
    return folder


def run(text: Path, out: Path, *arguments: str, looks_at_pictures: bool = False) -> int:
    """Run the script. Pictures are empty files unless `looks_at_pictures`: rendering takes longer than the run."""
    options = pretrain.parse_options([*TINY, "--data", str(text), "--out", str(out), *arguments])
    if "--resume" in arguments and "--steps" not in arguments:
        options.steps = None
    save = figures.save if looks_at_pictures else lambda _figure, path: path.write_bytes(b"\x89PNG")
    with patch.object(pretrain, "SAMPLE_BYTES", 4), patch.object(figures, "save", save):
        return pretrain.run(options, ["pretrain.py"])


def saved(out: Path) -> dict[str, Any]:
    """Everything in the checkpoint, flat, so that two of them can be compared bit for bit."""
    training: dict[str, Any] = json.loads((out / "checkpoint/training.json").read_text())
    reader = dcp.HuggingFaceStorageReader(str(out / "checkpoint"))
    found: Any = reader.read_metadata().state_dict_metadata
    flat: dict[str, Any] = {name: torch.empty(part.size, dtype=part.properties.dtype) for name, part in found.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(flat, storage_reader=reader)
    weights = {name.removeprefix("model.") for name in flat if name.startswith("model.")}
    moments = {name.removeprefix("optimizer.").rpartition(".")[0] for name in flat if name.startswith("optimizer.")}
    assert weights - {name for name in weights if name.endswith("score_correction_bias")} == moments
    return flat | training


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, name


@contextmanager
def after_step(step: int, action: Callable[[], object]) -> Iterator[None]:
    """Call a function after a step of the training, in this process."""
    original = pretrain.Trainer.train_step

    def train_step(trainer: pretrain.Trainer) -> Any:
        output = original(trainer)
        if trainer.step == step:
            action()
        return output

    with patch.object(pretrain.Trainer, "train_step", train_step):
        yield
