"""The command `python -m maxmoe plan`: the fastest plans of a published model, or the speeds of this machine."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from maxmoe.calibration import calibrate
from maxmoe.checks.fields import nearest
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.planning import StateDtypes, search
from maxmoe.planning.time_model.device import device_names
from maxmoe.presets.published import PUBLISHED, PublishedModel
from maxmoe.sharding.rules import preset_names
from maxmoe.text_table import paragraph, terminal_width

DTYPES = ("bfloat16", "float16", "float32")
UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
}
CONVENTION = (
    "Predicted by the time model of docs/planning.md; memory and bytes are those of `explain`. A step: compute, exposed"
    " communication and bubble; hidden communication runs beside products. FLOPs and bytes: of one rank in a step."
)


def published(name: str) -> PublishedModel:
    """Return a published model by its name."""
    if name not in PUBLISHED:
        raise ValueError(f"there is no model {name!r}{nearest(name, PUBLISHED)}")
    return PUBLISHED[name]


def parse_bytes(text: str) -> int:
    """Parse a number of bytes, such as 80GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text.strip())
    if match is None or match[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 80GiB, got {text!r}")
    number = int(float(match[1]) * UNITS[match[2]])
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least one byte, got {text!r}")
    return number


def add_state_dtypes(add: Callable[..., Any]) -> None:
    """Add the options of the dtypes of gradients and optimizer state."""
    add("--gradient-dtype", choices=DTYPES, help="dtype of the gradients, if not that of the parameters")
    add("--master-dtype", choices=DTYPES, help="dtype of master weights; without it, there are none")
    add("--moment-dtype", choices=DTYPES, help="dtype of the moments of the optimizer, if not that of the parameters")


def state_dtypes(options: argparse.Namespace) -> StateDtypes:
    """Return the dtypes that the options say."""
    names = {"gradients": options.gradient_dtype, "master": options.master_dtype, "moments": options.moment_dtype}
    return StateDtypes(**{name: getattr(torch, dtype) for name, dtype in names.items() if dtype})


def add_plan(commands: Any, positive: Callable[[str], int]) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "plan",
        help="search for the fastest plans of a model on a number of ranks",
        description="Search meshes, rules, strategies, chunks and recomputation for the fastest plans that fit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.set_defaults(report=find)
    add = command.add_argument
    add("--preset", help=f"the model: {', '.join(PUBLISHED)}")
    add("--world-size", type=positive, help="number of ranks")
    add("--device", default="h100", help=f"the device: {', '.join(device_names())}, or a YAML file")
    add("--memory", type=parse_bytes, help="bytes of a rank, as 80GiB; those of the device by default")
    add("--batch-size", type=positive, default=256, help="number of sequences per step, over all ranks")
    add("--sequence-length", type=positive, default=4096, help="number of tokens per sequence")
    add("--rules", nargs="+", help=f"presets or YAML files to try, all by default: {', '.join(preset_names())}")
    add("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the parameters")
    add_state_dtypes(add)
    add("--num-layers", type=positive, help="replaces the published value")
    add("--num-plans", type=positive, default=10, help="number of plans to print")
    add("--calibrate", type=Path, metavar="FILE", help="measure this machine, write a device file, and search nothing")


def find(options: argparse.Namespace) -> str:
    """Return the report of the search, or of the calibration."""
    if options.calibrate is not None:
        device = calibrate(options.calibrate.stem, num_ranks=options.world_size or 2)
        device.save(options.calibrate)
        return f"Written: {options.calibrate}. Use it with --device {options.calibrate}"
    if options.preset is None or options.world_size is None:
        raise ValueError("plan needs --preset and --world-size, or --calibrate")
    model = published(options.preset)
    changes = {} if options.num_layers is None else {"num_layers": options.num_layers}
    config = DecoderConfig.of_published(model, max_sequence_length=options.sequence_length, **changes)
    decoder = Decoder(config, device="meta", dtype=getattr(torch, options.dtype))
    result = search(
        decoder,
        options.world_size,
        options.device,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        memory=options.memory,
        rules=options.rules,
        state_dtypes=state_dtypes(options),
        num_plans=options.num_plans,
    )
    difference = f" Differs from the published model: {model.differs}." if model.differs else ""
    head = (
        f"{model.name}: a Decoder of {config.num_layers} layers on {options.world_size} ranks of {options.device}. "
        f"A step: {options.batch_size} sequences of {options.sequence_length} tokens.{difference}"
    )
    width = terminal_width()
    return "\n\n".join([paragraph(head, width=width), str(result), paragraph(CONVENTION, width=width or 120)])
