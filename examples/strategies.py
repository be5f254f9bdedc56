"""Train one small model by every strategy of Mixture-of-Experts parallelism, and compare them with one process.

    python examples/strategies.py                     8 ranks on this machine, two minutes on two cores
    python examples/strategies.py --random-routing    with random scores, for balanced routing
    python examples/strategies.py --dtype float32     where the order of summation changes the rounding

The model has the layers of DeepSeek-V3: a dense block, then blocks with groups of experts, a shared expert and a
correction bias. All runs start from the same parameters and read the same batches. The ranks are processes on this
machine. The table is written to strategies.md and the picture to strategies.png in the folder --out.
"""

import argparse
import math
import sys
from collections.abc import Sequence

from dispatching import figures
from dispatching.comparison import DIGITS, Comparison, compare, comparison_parser
from dispatching.strategies import strategies
from dispatching.training import MIB, Run, train_all
from pretraining.command import exit_status


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = comparison_parser("strategies", __doc__, optimizer="AdamW", steps=20)
    parser.add_argument("--random-routing", action="store_true", help="random router scores")
    return parser.parse_args(arguments)


def row(run: Run, one_process: Run, options: argparse.Namespace) -> Sequence[str]:
    """Return the cells of a run in the table."""
    digits, tokens_per_step = DIGITS[options.dtype], options.batch_size * options.sequence_length
    return (
        run.strategy.name,
        f"{run.losses[-1]:.{digits}f}",
        f"{math.exp(run.losses[-1]):.{digits - 2}f}",
        f"{max(run.loss_differences):.0e}" if run.strategy.mesh else "",
        f"{max(run.gradient_differences):.0e}" if run.strategy.mesh else "",
        f"{run.tokens_per_second(tokens_per_step):,.0f}",
        f"{run.peak / MIB:.1f}",
        f"{run.sent.total() / MIB:.2f}",
    )


COMPARISON = Comparison(
    name="strategies",
    strategies=strategies,
    train_all=train_all,
    columns=("strategy", "loss", "perplexity", "loss apart", "gradients apart", "tokens/s", "peak MiB", "sent MiB"),
    row=row,
    draw=figures.comparison,
)


def run(options: argparse.Namespace) -> int:
    """Run the comparison and return the exit status."""
    return compare(COMPARISON, options)


if __name__ == "__main__":
    sys.exit(exit_status("strategies", lambda: run(parse_options())))
