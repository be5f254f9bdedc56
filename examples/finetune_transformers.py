"""Train a small model of transformers with three implementations of its experts, and compare them.

    python examples/finetune_transformers.py                       Mixtral, a few minutes
    python examples/finetune_transformers.py --family qwen3_moe    any family with experts
    python examples/finetune_transformers.py --lora                adapters of PEFT on frozen experts
    python examples/finetune_transformers.py --data notes/         on other text than the Python standard library

All runs start from the same randomly initialized parameters. Each implementation
(eager, grouped_mm, maxmoe) trains in its own process. They take turns, one step each, so that other load on the machine
slows all of them alike. The picture is written to comparison.png in the folder --out.
"""

import argparse
import os
import sys
from pathlib import Path
from statistics import mean

from finetuning import figures
from finetuning.models import small_model
from finetuning.training import MIB, Run
from finetuning.turns import train_in_turns
from pretraining import InputError
from pretraining.command import LARGEST_DEPTH, LARGEST_SEED, HelpFormatter, at_least, exit_status, prepare_output
from pretraining.corpus import load_corpus

LARGEST_BATCH = 2**20  # tokens per step
IMPLEMENTATIONS = ("eager", "grouped_mm", "maxmoe")


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--family", default="mixtral", help="model_type of transformers; a wrong one lists all")
    add("--data", nargs="+", default=[], help="files, folders, patterns; else the standard library")
    add("--out", type=Path, default=Path("runs/finetune"), help="folder of the picture")
    add("--lora", action="store_true", help="train adapters of the experts (rank 8) and nothing else")
    add("--learning-rate", type=at_least(0, float), default=1e-3, help="at its peak")
    add("--seed", type=at_least(0, at_most=LARGEST_SEED), default=0, help="of parameters and data order")
    add("--threads", type=at_least(1, at_most=1024), default=os.cpu_count(), help="to compute with")
    add("--steps", type=at_least(1), default=300, help="optimizer steps")
    add("--batch-size", type=at_least(1), default=8, help="sequences per step")
    add("--sequence-length", type=at_least(2), default=128, help="bytes per sequence")
    add("--hidden-size", type=at_least(16), default=128, help="width of the model, a multiple of 16")
    add("--num-layers", type=at_least(1, at_most=LARGEST_DEPTH), default=4, help="blocks")
    add("--num-experts", type=at_least(1), default=16, help="experts per block")
    add("--top-k", type=at_least(1), default=2, help="experts per byte")
    add("--intermediate-size", type=at_least(1), default=128, help="width inside each expert")
    return parser.parse_args(arguments)


def table(runs: list[Run]) -> str:
    """Format a table with one row per run, which compares its losses with the first run's losses.

    The runs start equal. They sum in different orders, so rounding differs; later a router selects a different expert,
    and the losses diverge. None of the runs is more accurate than the others.
    """
    tenth = max(1, len(runs[0].losses) // 10)
    columns = (
        *("loss at the end", "difference, first tenth", "difference, all"),
        *("tokens/s", "peak MiB", "trained parameters"),
    )
    lines = ["  ".join([f"{'experts':<10}", *columns])]
    for run in runs:
        differences = [abs(one - other) for one, other in zip(run.losses, runs[0].losses, strict=True)]
        cells = (
            f"{mean(run.losses[-tenth:]):.4f}",
            f"{max(differences[:tenth]):.1e}",
            f"{max(differences):.1e}",
            f"{run.tokens_per_second:,.0f}",
            f"{run.peak / MIB:,.0f}",
            f"{run.num_trained:,}",
        )
        aligned = (cell.rjust(len(column)) for cell, column in zip(cells, columns, strict=True))
        lines.append("  ".join([f"{run.implementation:<10}", *aligned]))
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """Run all implementations and return the exit status."""
    num_tokens = options.batch_size * options.sequence_length
    if num_tokens > LARGEST_BATCH:
        raise InputError(
            f"--batch-size {options.batch_size} with --sequence-length {options.sequence_length} makes "
            f"{num_tokens:,} tokens a step, more than {LARGEST_BATCH:,}"
        )
    corpus = load_corpus(options.data, options.sequence_length)
    print(f"Text: {corpus.description}")
    num_parameters = sum(parameter.numel() for parameter in small_model(options, "eager").parameters())
    print(f"Model: {options.family}, {num_parameters:,} parameters")
    picture = options.out / "comparison.png"
    prepare_output(options.out, picture.name)
    runs = train_in_turns(options, corpus.training, IMPLEMENTATIONS)
    print(f"\n{table(runs)}\n")
    try:
        figures.comparison(picture, options.family, runs)
    except OSError as error:
        raise InputError(f"cannot write {picture}: {error.strerror}") from error
    print("Picture:", picture)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status("finetune_transformers", lambda: run(parse_options())))
