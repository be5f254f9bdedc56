"""Train one small model with Muon, sharded in three ways, and compare what Muon costs.

    python examples/muon_sharding.py                     8 ranks on this machine, a minute on two cores
    python examples/muon_sharding.py --dtype float32     where sums in another order are rounded otherwise

Newton-Schulz needs whole matrices. Under `pure-fsdp` a rank has a part of each: one rank gathers it, computes and
scatters. Under `shard-exp-on-fsdp` that is left for attention and the dense block: experts are whole. Under `ep-as-dp`
without FSDP there is no collective, and every rank computes all matrices but the routed experts of other ranks.

The model is that of `examples/strategies.py`. All begin with the same parameters and read the same batches; the ranks
are processes that this one starts. The folder --out gets the table as muon_sharding.md and a picture,
muon_sharding.png.
"""

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from dispatching import figures
from dispatching.markdown import markdown_table
from dispatching.muon import MuonRun, train_all
from dispatching.strategies import Strategy, muon_strategies
from dispatching.training import MIB
from pretraining import InputError
from pretraining.command import LARGEST_SEED, HelpFormatter, at_least, exit_status, prepare_output
from pretraining.corpus import load_corpus

DIGITS = {"float64": 10, "float32": 4}  # of a loss


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    parser.set_defaults(random_routing=False)
    add = parser.add_argument
    add("--ranks", type=int, choices=[2, 4, 8], default=8, help="processes of every strategy but the first")
    add("--dtype", choices=[*DIGITS], default="float64", help="of everything, Newton-Schulz too")
    add("--data", nargs="+", default=[], help="files, folders, patterns; else the standard library")
    add("--out", type=Path, default=Path("runs/muon_sharding"), help="folder of the results")
    add("--learning-rate", type=at_least(0, float), default=1e-3, help="of Muon, in the scale of AdamW")
    add("--seed", type=at_least(0, at_most=LARGEST_SEED), default=0, help="of parameters and data order")
    add("--steps", type=at_least(2), default=10, help="optimizer steps")
    add("--batch-size", type=at_least(1), default=16, help="sequences per step, a multiple of --ranks")
    add("--sequence-length", type=at_least(1), default=64, help="bytes per sequence")
    return parser.parse_args(arguments)


def table(runs: list[MuonRun], options: argparse.Namespace) -> str:
    """Write the runs below each other, in Markdown."""
    columns = (
        "strategy", "loss", "loss apart", "step ms", "Muon ms", "sent MiB", "Muon MiB", "Muon collectives"
    )  # fmt: skip
    rows = [
        (
            run.strategy.name,
            f"{run.losses[-1]:.{DIGITS[options.dtype]}f}",
            f"{run.loss_difference(runs[0]):.0e}" if run.strategy.mesh else "",
            f"{1e3 * run.step_time:,.0f}",
            f"{1e3 * run.muon_time:,.0f}",
            f"{run.sent / MIB:.2f}",
            f"{run.muon_sent / MIB:.2f}",
            str(run.collectives),
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
    outputs = [options.out / name for name in ("muon_sharding.md", "muon_sharding.png")]
    prepare_output(options.out, *(path.name for path in outputs))
    num_steps = options.steps * (1 + len(muon_strategies(options.ranks)))
    with tqdm(total=num_steps, unit=" steps", dynamic_ncols=True) as progress:

        def advance(strategy: Strategy) -> None:
            progress.set_postfix_str(strategy.name, refresh=False)
            progress.update()

        runs = train_all(options, corpus.training, advance)
    print(f"\n{table(runs, options)}\n")
    try:
        outputs[0].write_text(f"{table(runs, options)}\n")
        figures.muon_comparison(outputs[1], runs, options)
    except OSError as error:
        raise InputError(f"cannot write to {options.out}: {error.strerror}") from error
    print("Written:", *outputs)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status("muon_sharding", lambda: run(parse_options())))
