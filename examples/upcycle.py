"""Turn a dense Llama of transformers into a Mixture-of-Experts model, and train both on the same batches.

    python examples/upcycle.py                              a small Llama, a minute; a token costs as much as before
    python examples/upcycle.py --slices 1 --num-experts 8   whole copies; with --top-k 2, twice the cost
    python examples/upcycle.py --reinitialized 0.5          drop-upcycling
    python examples/upcycle.py --checkpoint llama/          the model in a folder of save_pretrained
    python examples/upcycle.py --data notes/                on other text than the Python standard library

Without --checkpoint the dense model starts from random weights and trains for --dense-steps. Then a copy of it gets
MoE layers by `MoE.from_dense`, and both models train for --steps, one step each in turn, with new optimizers and the
same learning rate. The picture upcycle.png in the folder --out has both curves. Ctrl-C finishes the step and draws it.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import get_args

import torch
from tqdm import tqdm

from finetuning import upcycling_figure
from finetuning.token_text import load_text
from finetuning.upcycling import ModelRun, dense_model, difference, num_parameters, upcycled
from maxmoe.convert.upcycling import Scaling
from pretraining import InputError
from pretraining.command import (
    LARGEST_DEPTH,
    LARGEST_SEED,
    HelpFormatter,
    StopRequest,
    at_least,
    exit_status,
    prepare_output,
)
from pretraining.corpus import TrainingSequences
from pretraining.trainer import learning_rate

PICTURE = "upcycle.png"


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", type=Path, help="folder with config.json and safetensors of a dense model")
    add("--data", nargs="+", default=[], help="files, folders, patterns; else the standard library")
    add("--out", type=Path, default=Path("runs/upcycle"), help="folder of the picture")
    add("--slices", type=at_least(1), default=2, help="slices of a dense block; an expert has the width of one")
    add("--num-experts", type=at_least(1), default=16, help="experts per block, a multiple of --slices")
    add("--top-k", type=at_least(1), default=2, help="experts per token, a multiple of --slices")
    add("--scaling", choices=get_args(Scaling), default="down_proj", help="see MoE.from_dense")
    add("--noise", type=at_least(0, float), default=0.0, help="noise on the experts, relative to their weights")
    add("--reinitialized", type=at_least(0, float, at_most=1), default=0.0, help="fraction of channels drawn anew")
    add("--dense-steps", type=at_least(0), help="steps of the dense model before (default: 300, 0 for a checkpoint)")
    add("--steps", type=at_least(1), default=300, help="steps of both models afterwards")
    add("--learning-rate", type=at_least(0, float), default=2e-3, help="at its peak")
    add("--seed", type=at_least(0, at_most=LARGEST_SEED), default=0, help="of parameters and data order")
    add("--threads", type=at_least(1, at_most=1024), default=os.cpu_count(), help="to compute with")
    add("--batch-size", type=at_least(1), default=8, help="sequences per step")
    add("--sequence-length", type=at_least(2), default=128, help="tokens per sequence")
    add("--hidden-size", type=at_least(8), default=128, help="width of the small Llama, a multiple of 8")
    add("--intermediate-size", type=at_least(1), default=256, help="width of the dense blocks of the small Llama")
    add("--num-layers", type=at_least(1, at_most=LARGEST_DEPTH), default=2, help="blocks of the small Llama")
    options = parser.parse_args(arguments)
    if options.dense_steps is None:
        options.dense_steps = 0 if options.checkpoint else 300
    return options


def train(runs: Sequence[ModelRun], batches: TrainingSequences, first_step: int, steps: int, rate: float) -> int:
    """Take steps with all models in turn, on the same batches.

    Args:
        runs: models, which take one step each with every batch.
        batches: batches of the whole training.
        first_step: index of the first batch.
        steps: steps of each model.
        rate: learning rate at its peak.

    Returns:
        Number of the signal that stopped the training, or 0.
    """
    progress = tqdm(total=steps, unit=" steps", dynamic_ncols=True, mininterval=0.5)
    with progress, StopRequest() as stop:
        for step in range(steps):
            tokens = batches.batch(first_step + step)[0]
            losses = [run.step(tokens, learning_rate(step, steps, rate)) for run in runs]
            shown = ", ".join(f"{run.name} {loss:.3f}" for run, loss in zip(runs, losses, strict=True))
            progress.set_postfix_str(shown, refresh=False)
            progress.update()
            if stop.signal:
                return stop.signal
    return 0


def table(runs: Sequence[ModelRun]) -> str:
    """Format a table with one row per model."""
    lines = [f"{'model':<8}{'parameters':>14}{'of a token':>14}{'loss at first':>15}{'at the end':>12}{'ms/step':>10}"]
    for run in runs:
        tenth = max(1, len(run.losses) // 10)
        total, used = num_parameters(run.model)
        cells = f"{mean(run.losses[:tenth]):>15.4f}{mean(run.losses[-tenth:]):>12.4f}{1e3 * median(run.seconds):>10.1f}"
        lines.append(f"{run.name:<8}{total:>14,}{used:>14,}{cells}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """Train the dense model, upcycle it, train both and draw the curves; return the exit status."""
    torch.set_num_threads(options.threads)
    prepare_output(options.out, PICTURE)
    dense = dense_model(options)
    upcycled(dense, options)  # raises for sizes that do not fit, before the training
    text = load_text(options.data, options.sequence_length, dense.config, options.checkpoint)
    print(f"Text: {text.description}")
    batches = TrainingSequences(
        text.tokens, sequence_length=options.sequence_length, batch_size=options.batch_size, seed=options.seed
    )
    before = ModelRun("dense", dense)
    stopped_by = train([before], batches, 0, options.dense_steps, options.learning_rate)
    runs = []
    if not stopped_by:
        moe = upcycled(dense, options)
        print(f"Logits of the MoE model and the dense one differ by {difference(dense, moe, batches.batch(0)[0]):.1e}")
        runs = [ModelRun(name, model, options.dense_steps) for name, model in (("dense", dense), ("MoE", moe))]
        stopped_by = train(runs, batches, options.dense_steps, options.steps, options.learning_rate)
        print(f"\n{table(runs)}\n")
    picture = options.out / PICTURE
    try:
        upcycling_figure.draw(picture, before, runs)
    except OSError as error:
        raise InputError(f"cannot write {picture}: {error.strerror}") from error
    print("Picture:", picture)
    return 128 + stopped_by if stopped_by else 0


if __name__ == "__main__":
    sys.exit(exit_status("upcycle", lambda: run(parse_options())))
