"""Train one small model by every strategy of Mixture-of-Experts parallelism, and compare them with one process.

    python examples/strategies.py                     8 ranks on this machine, two minutes on two cores
    python examples/strategies.py --random-routing    with noise for scores: the work of a balanced routing
    python examples/strategies.py --dtype float32     where sums in another order are rounded otherwise

The model has the layers of DeepSeek-V3: a dense block, then blocks with groups of experts, a shared expert and a
correction bias. All begin with the same parameters and read the same batches; the ranks are processes that this one
starts. The folder --out gets the table as strategies.md and a picture, strategies.png.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

from dispatching import figures
from dispatching.markdown import markdown_table
from dispatching.strategies import Strategy, strategies
from dispatching.training import MIB, Run, train_all
from pretraining import InputError
from pretraining.command import LARGEST_SEED, HelpFormatter, at_least, exit_status, prepare_output
from pretraining.corpus import load_corpus

DIGITS = {"float64": 10, "float32": 4}  # of a loss


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--ranks", type=int, choices=[2, 4, 8], default=8, help="processes of every strategy but the first")
    add("--random-routing", action="store_true", help="noise for scores")
    add("--dtype", choices=[*DIGITS], default="float64", help="of everything")
    add("--data", nargs="+", default=[], help="files, folders, patterns; else the standard library")
    add("--out", type=Path, default=Path("runs/strategies"), help="folder of the results")
    add("--learning-rate", type=at_least(0, float), default=1e-3, help="of AdamW")
    add("--seed", type=at_least(0, at_most=LARGEST_SEED), default=0, help="of parameters and data order")
    add("--steps", type=at_least(2), default=20, help="optimizer steps")
    add("--batch-size", type=at_least(1), default=16, help="sequences per step, a multiple of --ranks")
    add("--sequence-length", type=at_least(1), default=64, help="bytes per sequence")
    return parser.parse_args(arguments)


def table(runs: list[Run], options: argparse.Namespace) -> str:
    """Write the runs below each other, in Markdown."""
    columns = (
        "strategy", "loss", "perplexity", "loss apart", "gradients apart", "tokens/s", "peak MiB", "sent MiB"
    )  # fmt: skip
    digits, tokens_per_step = DIGITS[options.dtype], options.batch_size * options.sequence_length
    rows = [
        (
            run.strategy.name,
            f"{run.losses[-1]:.{digits}f}",
            f"{math.exp(run.losses[-1]):.{digits - 2}f}",
            f"{max(run.loss_differences):.0e}" if run.strategy.mesh else "",
            f"{max(run.gradient_differences):.0e}" if run.strategy.mesh else "",
            f"{run.tokens_per_second(tokens_per_step):,.0f}",
            f"{run.peak / MIB:.1f}",
            f"{run.sent.total() / MIB:.2f}",
        )
        for run in runs
    ]
    return markdown_table(columns, rows)


def run(options: argparse.Namespace) -> int:
    """Do what the options say and return the exit status."""
    torch.set_num_threads(1)  # the ranks are forked, and threads would not be
    if options.batch_size % options.ranks:
        raise InputError(f"--batch-size {options.batch_size} is not divisible by --ranks {options.ranks}")
    corpus = load_corpus(options.data, options.sequence_length)
    print(f"Text: {corpus.description}")
    outputs = [options.out / name for name in ("strategies.md", "strategies.png")]
    prepare_output(options.out, *(path.name for path in outputs))
    num_steps = options.steps * (1 + len(strategies(options.ranks)))
    with tempfile.TemporaryDirectory() as record, tqdm(total=num_steps, unit=" steps", dynamic_ncols=True) as progress:

        def advance(strategy: Strategy) -> None:
            progress.set_postfix_str(strategy.name, refresh=False)
            progress.update()

        runs = train_all(options, corpus.training, Path(record), advance)
    print(f"\n{table(runs, options)}\n")
    try:
        outputs[0].write_text(f"{table(runs, options)}\n")
        figures.comparison(outputs[1], runs, options)
    except OSError as error:
        raise InputError(f"cannot write to {options.out}: {error.strerror}") from error
    print("Written:", *outputs)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status("strategies", lambda: run(parse_options())))
