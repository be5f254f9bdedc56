"""The command `plan`: the fastest plans of a model."""

import argparse
from typing import Any

from maxmoe.cli.model import add_model, add_state_dtypes, chosen_model, state_dtypes
from maxmoe.cli.values import parse_bytes, positive
from maxmoe.costs import search
from maxmoe.costs.device import device_names
from maxmoe.sharding.rules import preset_names
from maxmoe.text_table import report

STEP = ("batch_size", "sequence_length", "memory", "rules", "num_plans")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of the search."""
    add = command.add_argument
    add_model(add)
    add("--world-size", type=positive, required=True, help="number of ranks")
    add("--device", default="h100", help=f"the device: {', '.join(device_names())}, or a YAML file")
    add("--memory", type=parse_bytes, help="bytes of a rank, as 80GiB (default: the device's memory)")
    add("--batch-size", type=positive, default=256, help="number of sequences per step, over all ranks")
    add("--sequence-length", type=positive, default=4096, help="number of tokens per sequence")
    add("--rules", nargs="+", help=f"presets or YAML files to try, all by default: {', '.join(preset_names())}")
    add_state_dtypes(add)
    add("--num-plans", type=positive, default=10, help="number of plans to print")


def plan(options: argparse.Namespace) -> str:
    """Return the report of the search."""
    text, model = chosen_model(options, max_sequence_length=options.sequence_length)
    step: dict[str, Any] = {name: getattr(options, name) for name in STEP}
    result = search(
        model, options.world_size, options.device, state_dtypes=state_dtypes(options), progress=True, **step
    )
    head = (
        f"{text} On {options.world_size} ranks of {options.device}. A step: {options.batch_size} sequences of "
        f"{options.sequence_length} tokens."
    )
    first, _, rest = str(result).partition("\n\n")
    return "\n\n".join([first, report([head]), rest])
