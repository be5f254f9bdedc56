"""The options of a parameter group of `Muon`: known, complete and in range."""

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from maxmoe.config import nearest
from maxmoe.nn.declaration import FusedGate
from maxmoe.optim.matrix import Matrix
from maxmoe.optim.newton_schulz import steps_of

ADJUST_LR_FNS = (None, "original", "match_rms_adamw")
MUON = (
    "momentum",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
    "ns_dtype",
    "input_dim",
    "fused_gate",
)
OPTIONS = {"muon": ("lr", "weight_decay", *MUON), "adamw": ("lr", "weight_decay", "betas", "eps")}
COMMON = ("params", "param_names", "algorithm", "initial_lr")
NS_DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)


def complete(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults to the options of a group.

    Args:
        group: some options, and `params`.
        defaults: of Muon's options; lr and weight_decay are those of AdamW too.

    Returns:
        All options of the algorithm of the group.

    Raises:
        ValueError: for another algorithm, for an unknown key, with the nearest, and for values out of range.
    """
    algorithm = group.get("algorithm", "muon")
    if algorithm not in OPTIONS:
        raise ValueError(f"algorithm must be one of {sorted(OPTIONS)}, got {algorithm!r}{_first_names(group)}")
    known = (*COMMON, *OPTIONS[algorithm])
    for key in group:
        if key not in known:
            raise ValueError(f"a group of {algorithm} has no option {key!r}{nearest(key, known)}{_first_names(group)}")
    own = {"betas": (0.9, 0.999), "eps": 1e-8} if algorithm == "adamw" else {**Matrix()._asdict()}
    values = {**defaults, **own, **group, "algorithm": algorithm}
    options = {key: values[key] for key in known if key in values}
    _check_shared(options)
    (_check_adamw if algorithm == "adamw" else _check_muon)(options)
    return options


def _first_names(group: Mapping[str, Any]) -> str:
    names = [parameter[0] for parameter in list(group.get("params", ())) if isinstance(parameter, tuple)]
    return f" (the group of {names[0]})" if names else ""


def _check_shared(options: Mapping[str, Any]) -> None:
    if isinstance(options["lr"], Tensor) and options["lr"].numel() != 1:
        raise ValueError(f"lr must have one element, got {tuple(options['lr'].shape)}")
    for key in ("lr", "weight_decay", "eps", "momentum"):
        if key in options and not options[key] >= 0:
            raise ValueError(f"{key} must be at least 0, got {options[key]}")


def _check_adamw(options: Mapping[str, Any]) -> None:
    betas = options["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers from 0 to below 1, got {betas!r}")


def _check_muon(options: Mapping[str, Any]) -> None:
    steps_of(options["ns_coefficients"], options["ns_steps"])
    choices = {
        "adjust_lr_fn": ADJUST_LR_FNS,
        "ns_dtype": NS_DTYPES,
        "input_dim": (-1, -2),
        "fused_gate": (None, *get_args(FusedGate)),
    }
    for key, allowed in choices.items():
        if options[key] not in allowed:
            raise ValueError(f"{key} must be one of {allowed}, got {options[key]!r}")
