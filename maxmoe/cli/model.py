"""The model of a command: a published one, or one of your own; its dtypes."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from maxmoe.checks.fields import nearest
from maxmoe.cli.values import import_module, positive
from maxmoe.costs import StateDtypes
from maxmoe.families.family import published_models
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.nn import set_recompute

SIZES = ("num_layers", "num_dense_layers", "num_heads", "num_key_value_heads", "vocab_size", "intermediate_size")
DTYPES = ("bfloat16", "float16", "float32")


def add_model(add: Callable[..., Any]) -> None:
    """Add the options of the model."""
    add("model", nargs="?", help="a model of your own: module:function, importable from here, which returns it")
    add("--preset", help=f"or a published model: {', '.join(published_models())}")
    add("--dtype", choices=DTYPES, help="dtype of the parameters; bfloat16 for published models, else as they are made")
    for size in SIZES:
        add(f"--{size.replace('_', '-')}", type=positive, help="of a published model: replaces the published value")


def chosen_model(
    options: argparse.Namespace, recompute: tuple[str, ...] = (), *, max_sequence_length: int
) -> tuple[str, nn.Module]:
    """Return a sentence that says what the model is, and the model on the meta device."""
    changes = {size: getattr(options, size) for size in SIZES if getattr(options, size) is not None}
    if (options.model is None) == (options.preset is None):
        got = "neither" if options.model is None else f"{options.model} and --preset {options.preset}"
        raise ValueError(f"give either module:function or --preset, got {got}")
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
    if options.preset not in published_models():
        raise ValueError(f"there is no model {options.preset!r}{nearest(options.preset, published_models())}")
    published = published_models()[options.preset]
    sizes = {"max_sequence_length": max_sequence_length, "recompute": recompute, **changes}
    config = DecoderConfig.of_published(published, **sizes)
    dense = f", {config.num_dense_layers} of them dense" if config.num_dense_layers else ""
    text = f"{published.name}: a Decoder of {config.num_layers} layers{dense}, embedding and output projection."
    text += f" Differs from the published model: {published.differs}." if published.differs else ""
    text += "".join(f" Here --{name.replace('_', '-')} {value}." for name, value in changes.items())
    return text, Decoder(config, device="meta", dtype=getattr(torch, options.dtype or "bfloat16"))


def _function(text: str) -> Callable[[], nn.Module]:
    """Return the function of "module:function"; the folder of the call is searched first."""
    module, _, name = text.partition(":")
    if not name:
        raise ValueError(f"a model must read like module:function, got {text!r}")
    sys.path.insert(0, "")
    try:
        function: Callable[[], nn.Module] = getattr(import_module(module), name)
    except AttributeError:
        raise ValueError(f"{module} has no function {name!r}") from None
    finally:
        sys.path.remove("")
    return function


def add_state_dtypes(add: Callable[..., Any]) -> None:
    """Add the options of the dtypes of gradients and optimizer state."""
    add("--gradient-dtype", choices=DTYPES, help="dtype of the gradients; the dtype of the parameters by default")
    add("--master-dtype", choices=DTYPES, default="float32", help="dtype of the master weights of narrower parameters")
    add("--moment-dtype", choices=DTYPES, help="dtype of the moments; float32 by default, or wider as the parameters")


def state_dtypes(options: argparse.Namespace) -> StateDtypes:
    """Return the dtypes that the options say."""
    names = {"gradients": options.gradient_dtype, "master": options.master_dtype, "moments": options.moment_dtype}
    return StateDtypes(**{name: getattr(torch, dtype) for name, dtype in names.items() if dtype})
