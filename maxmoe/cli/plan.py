"""The command `python -m maxmoe plan`, and the model of a command: a published one, or one of your own."""

import argparse
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maxmoe.checks.fields import nearest
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.nn import set_recompute
from maxmoe.planning import StateDtypes, search
from maxmoe.planning.device import Device, device_names
from maxmoe.presets.published import PUBLISHED
from maxmoe.sharding.rules import preset_names
from maxmoe.text_table import paragraph, terminal_width

SIZES = ("num_layers", "num_dense_layers", "num_heads", "num_key_value_heads", "vocab_size", "intermediate_size")
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


def add_model(add: Callable[..., Any]) -> None:
    """Add the options of the model."""
    add("model", nargs="?", help="a model of your own: module:function, importable from here, which returns it")
    add("--preset", help=f"or a published model: {', '.join(PUBLISHED)}")
    add("--dtype", choices=DTYPES, help="dtype of the parameters; bfloat16 for published models, else as they are made")
    for size in SIZES:
        add(f"--{size.replace('_', '-')}", type=positive, help="of a published model: replaces the published value")


def chosen_model(
    options: argparse.Namespace, recompute: tuple[str, ...] = (), *, max_sequence_length: int
) -> tuple[str, nn.Module]:
    """Return a sentence that says what the model is, and the model on the meta device."""
    changes = {size: getattr(options, size) for size in SIZES if getattr(options, size) is not None}
    if (options.model is None) == (options.preset is None):
        raise ValueError(f"give either module:function or --preset, got {options.model!r} and {options.preset!r}")
    if options.preset is None:
        if changes:
            raise ValueError(f"--{next(iter(changes)).replace('_', '-')} needs --preset")
        with torch.device("meta"):
            model = _function(options.model)()
        if not isinstance(model, nn.Module):
            raise ValueError(f"{options.model} must return a torch.nn.Module, got {type(model).__name__}")
        if options.dtype:
            model.to(getattr(torch, options.dtype))
        if recompute:
            set_recompute(model, recompute)
        count = sum(parameter.numel() for parameter in model.parameters())
        return f"{options.model}: a {type(model).__name__} of {count:,} parameters.", model
    if options.preset not in PUBLISHED:
        raise ValueError(f"there is no model {options.preset!r}{nearest(options.preset, PUBLISHED)}")
    published = PUBLISHED[options.preset]
    sizes = {"max_sequence_length": max_sequence_length, "recompute": recompute, **changes}
    config = DecoderConfig.of_published(published, **sizes)
    dense = f", {config.num_dense_layers} of them dense" if config.num_dense_layers else ""
    text = f"{published.name}: a Decoder of {config.num_layers} layers{dense}, embedding and output projection."
    text += f" Differs from the published model: {published.differs}." if published.differs else ""
    text += "".join(f" Here {name}={value}." for name, value in changes.items())
    return text, Decoder(config, device="meta", dtype=getattr(torch, options.dtype or "bfloat16"))


def _function(text: str) -> Callable[[], nn.Module]:
    """Return the function of "module:function"; the folder of the call is searched first."""
    module, _, name = text.partition(":")
    if not name:
        raise ValueError(f"a model must read like module:function, got {text!r}")
    sys.path.insert(0, "")
    try:
        function: Callable[[], nn.Module] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            raise ValueError(f"there is no module {error.name!r} to import from this folder") from None
        raise
    except AttributeError:
        raise ValueError(f"{module} has no function {name!r}") from None
    finally:
        sys.path.remove("")
    return function


def positive(text: str) -> int:
    """Parse a positive integer."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


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


def add_plan(commands: Any) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "plan",
        help="search for the fastest plans of a model on a number of ranks",
        description="Search meshes, rules, strategies, chunks and recomputation for the fastest plans that fit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.set_defaults(report=plan)
    add = command.add_argument
    add_model(add)
    add("--world-size", type=positive, help="number of ranks")
    add("--device", default="h100", help=f"the device: {', '.join(device_names())}, or a YAML file")
    add("--memory", type=parse_bytes, help="bytes of a rank, as 80GiB; those of the device by default")
    add("--batch-size", type=positive, default=256, help="number of sequences per step, over all ranks")
    add("--sequence-length", type=positive, default=4096, help="number of tokens per sequence")
    add("--rules", nargs="+", help=f"presets or YAML files to try, all by default: {', '.join(preset_names())}")
    add_state_dtypes(add)
    add("--num-plans", type=positive, default=10, help="number of plans to print")
    add("--calibrate", type=Path, metavar="FILE", help="measure this machine, write a device file, and search nothing")


def plan(options: argparse.Namespace) -> str:
    """Return the report of the search, or of the calibration."""
    if options.calibrate is not None:
        return calibrate(options.calibrate, options.world_size or 2)
    if options.world_size is None:
        raise ValueError("plan needs --world-size, or --calibrate")
    text, model = chosen_model(options, max_sequence_length=options.sequence_length)
    result = search(
        model,
        options.world_size,
        options.device,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        memory=options.memory,
        rules=options.rules,
        state_dtypes=state_dtypes(options),
        num_plans=options.num_plans,
        progress=True,
    )
    head = (
        f"{text} On {options.world_size} ranks of {options.device}. A step: {options.batch_size} sequences of "
        f"{options.sequence_length} tokens."
    )
    width = terminal_width()
    first, _, rest = str(result).partition("\n\n")
    return "\n\n".join([first, paragraph(head, width=width), rest, paragraph(CONVENTION, width=width or 120)])


def calibrate(path: Path, num_ranks: int) -> str:
    """Measure this machine with the benchmarks of the repository, and write a device file."""
    try:
        benchmark = importlib.import_module("benchmarks.calibration")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--calibrate must run in a checkout of the repository with its extra 'examples': {error}"
        ) from None
    device: Device = benchmark.calibrate(path.stem, num_ranks=num_ranks)
    device.save(path)
    return f"Written: {path}. Use it with --device {path}"
