"""The command `compare_ranks`, which needs no compiled operators."""

import argparse

from maxmoe import testing
from maxmoe.cli.values import import_module, positive
from maxmoe.testing import RankComparison

TRAINING = ("build_model", "parallelize", "make_batch", "loss")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of the comparison."""
    command.add_argument("module", help="name of a module, importable from here, with the functions of the training")
    command.add_argument("--num-ranks", type=positive, default=2, help="number of ranks, processes on the CPU")
    command.add_argument("--steps", type=positive, default=1, help="number of steps, with make_update of the module")
    command.add_argument("--timeout", type=positive, default=300, help="seconds for each start of processes")


def compare_ranks(options: argparse.Namespace) -> RankComparison:
    """Return the report of `compare_ranks`."""
    module = import_module(options.module)
    functions = {name: getattr(module, name, None) for name in TRAINING}
    missing = [name for name, function in functions.items() if function is None]
    if missing:
        raise ValueError(f"{options.module} must have the functions {', '.join(TRAINING)}, got no {', '.join(missing)}")
    functions |= {name: getattr(module, name, None) for name in ("step", "make_update")}
    numbers = {"num_ranks": options.num_ranks, "steps": options.steps, "timeout": options.timeout}
    return testing.compare_ranks(**functions, **numbers)  # type: ignore[arg-type]
