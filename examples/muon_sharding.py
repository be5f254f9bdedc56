"""Train one small model with Muon, sharded in three ways, and compare what Muon costs.

    python examples/muon_sharding.py                     8 ranks on this machine, a minute on two cores
    python examples/muon_sharding.py --dtype float32     where the order of summation changes the rounding

Newton-Schulz needs whole matrices. Under `pure-fsdp` each rank has a shard of every matrix: one rank gathers a matrix,
computes and scatters the result. Under `shard-exp-on-fsdp` experts are whole, so only the matrices of attention and of
the dense block are gathered. Under `ep-as-dp` without FSDP there is no collective: every rank computes all matrices
except the routed experts of other ranks.

The model is the one of `examples/strategies.py`. All runs start from the same parameters and read the same batches. The
ranks are processes on this machine. The table is written to muon_sharding.md and the picture to muon_sharding.png,
both in the folder --out.
"""

import argparse
import sys
from collections.abc import Sequence

from dispatching import figures
from dispatching.comparison import DIGITS, Comparison, compare, comparison_parser
from dispatching.muon import MuonRun, train_all
from dispatching.strategies import muon_strategies
from dispatching.training import MIB
from pretraining.command import exit_status


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = comparison_parser("muon_sharding", __doc__, optimizer="Muon, in the scale of AdamW", steps=10)
    parser.set_defaults(random_routing=False)
    return parser.parse_args(arguments)


def row(run: MuonRun, one_process: MuonRun, options: argparse.Namespace) -> Sequence[str]:
    """Return the cells of a run in the table."""
    return (
        run.strategy.name,
        f"{run.losses[-1]:.{DIGITS[options.dtype]}f}",
        f"{run.loss_difference(one_process):.0e}" if run.strategy.mesh else "",
        f"{1e3 * run.step_time:,.0f}",
        f"{1e3 * run.muon_time:,.0f}",
        f"{run.sent / MIB:.2f}",
        f"{run.muon_sent / MIB:.2f}",
        str(run.collectives),
    )


COMPARISON = Comparison(
    name="muon_sharding",
    strategies=muon_strategies,
    train_all=train_all,
    columns=("strategy", "loss", "loss apart", "step ms", "Muon ms", "sent MiB", "Muon MiB", "Muon collectives"),
    row=row,
    draw=figures.muon_comparison,
)


def run(options: argparse.Namespace) -> int:
    """Run the comparison and return the exit status."""
    return compare(COMPARISON, options)


if __name__ == "__main__":
    sys.exit(exit_status("muon_sharding", lambda: run(parse_options())))
