"""The command line, the runs and the table of `examples/strategies.py` and `examples/muon_sharding.py`."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dispatching.strategies import Strategy
from pretraining import InputError
from pretraining.command import LARGEST_SEED, HelpFormatter, at_least, prepare_output
from pretraining.corpus import load_corpus

DIGITS = {"float64": 10, "float32": 4}  # decimals of a loss in the table


@dataclass(frozen=True)
class Comparison:
    """A comparison of strategies: its training, table and picture.

    Args:
        name: name of the result files.
        strategies: returns the strategies for a number of ranks, without the one for a single process.
        train_all: takes the options, the text ``(N,)`` uint8 and a function to call after every step; returns the
            runs, the run of one process first.
        columns: headings of the table.
        row: takes a run, the first run and the options; returns the cells of the run.
        draw: takes a path, the runs and the options; writes the picture.
    """

    name: str
    strategies: Callable[[int], list[Strategy]]
    train_all: Callable[[argparse.Namespace, Tensor, Callable[[Strategy], None]], list[Any]]
    columns: Sequence[str]
    row: Callable[[Any, Any, argparse.Namespace], Sequence[str]]
    draw: Callable[[Path, list[Any], argparse.Namespace], None]


def comparison_parser(name: str, description: str | None, *, optimizer: str, steps: int) -> argparse.ArgumentParser:
    """Return a parser with the options of both comparisons."""
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--ranks", type=int, choices=[2, 4, 8], default=8, help="processes of every strategy but the first")
    add("--dtype", choices=[*DIGITS], default="float64", help="of everything")
    add("--data", nargs="+", default=[], help="files, folders, patterns; else the standard library")
    add("--out", type=Path, default=Path("runs") / name, help="folder of the results")
    add("--learning-rate", type=at_least(0, float), default=1e-3, help=f"of {optimizer}")
    add("--seed", type=at_least(0, at_most=LARGEST_SEED), default=0, help="of parameters and data order")
    add("--steps", type=at_least(2), default=steps, help="optimizer steps")
    add("--batch-size", type=at_least(1), default=16, help="sequences per step, a multiple of --ranks")
    add("--sequence-length", type=at_least(1), default=64, help="bytes per sequence")
    return parser


def compare(comparison: Comparison, options: argparse.Namespace) -> int:
    """Train, write the results and return the exit status."""
    torch.set_num_threads(1)  # the ranks are forked, which does not copy threads
    if options.batch_size % options.ranks:
        raise InputError(f"--batch-size {options.batch_size} is not divisible by --ranks {options.ranks}")
    corpus = load_corpus(options.data, options.sequence_length)
    print(f"Text: {corpus.description}")
    outputs = [options.out / f"{comparison.name}.{suffix}" for suffix in ("md", "png")]
    prepare_output(options.out, *(path.name for path in outputs))
    num_steps = options.steps * (1 + len(comparison.strategies(options.ranks)))
    with tqdm(total=num_steps, unit=" steps", dynamic_ncols=True) as progress:

        def advance(strategy: Strategy) -> None:
            progress.set_postfix_str(strategy.name, refresh=False)
            progress.update()

        runs = comparison.train_all(options, corpus.training, advance)
    table = markdown_table(comparison.columns, [comparison.row(run, runs[0], options) for run in runs])
    print(f"\n{table}\n")
    try:
        outputs[0].write_text(f"{table}\n")
        comparison.draw(outputs[1], runs, options)
    except OSError as error:
        raise InputError(f"cannot write to {options.out}: {error.strerror}") from error
    print("Written:", *outputs)
    return 0


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with padded cells, the first column aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [[columns[0].ljust(widths[0]), *map(str.rjust, columns[1:], widths[1:])], rule]
    lines += [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
