"""Checks of the options of parameter groups, parameters and state dicts of `Muon`."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from maxmoe.checks.fields import nearest
from maxmoe.declaration import FusedGate
from maxmoe.optim.newton_schulz import Matrix, steps_of

MUON = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "ns_dtype", *Matrix._fields)
OPTIONS = {"muon": ("lr", "weight_decay", *MUON), "adamw": ("lr", "weight_decay", "betas", "eps")}
COMMON = ("params", "param_names", "algorithm", "initial_lr")
CHOICES = {
    "adjust_lr_fn": (None, "original", "match_rms_adamw"),
    "ns_dtype": (None, torch.bfloat16, torch.float32, torch.float64),
    "input_dim": (-1, -2),
    "fused_gate": (None, *get_args(FusedGate)),
}


def complete_group(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with all options of its algorithm, taken from `defaults` if the group lacks them; check them."""
    algorithm = group.get("algorithm", "muon")
    if algorithm not in OPTIONS:
        raise ValueError(f"algorithm must be one of {sorted(OPTIONS)}, got {algorithm!r}")
    known = (*COMMON, *OPTIONS[algorithm])
    for key in group:
        if key not in known:
            raise ValueError(f"a group of {algorithm} has no option {key!r}{nearest(key, known)}")
    own_defaults = {"betas": (0.9, 0.999), "eps": 1e-8} if algorithm == "adamw" else Matrix()._asdict()
    values = {**defaults, **own_defaults, **group, "algorithm": algorithm}
    options = {key: values[key] for key in known if key in values}
    _check_values(options)
    return options


def _check_values(options: Mapping[str, Any]) -> None:
    """Raise for an option that would have another effect than its name says, without an error of torch."""
    for key in ("lr", "weight_decay", "eps", "momentum"):
        if key in options and not options[key] >= 0:
            raise ValueError(f"{key} must be at least 0, got {options[key]}")
    for key, allowed in CHOICES.items():
        if key in options and options[key] not in allowed:
            raise ValueError(f"{key} must be one of {allowed}, got {options[key]!r}")
    if options["algorithm"] == "muon":
        steps_of(options["ns_coefficients"], options["ns_steps"])


def check_parameter(name: str, parameter: Tensor, group: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise unless the algorithm of a group can update a parameter; `given` is the group without defaults."""
    if not parameter.is_floating_point():
        raise ValueError(f"{name} must be floating and real, got {parameter.dtype}")
    if group["algorithm"] == "adamw":
        return
    shape = tuple(parameter.shape)
    if len(shape) < 2 or (len(shape) > 2 and "input_dim" not in given):
        raise ValueError(
            f"{name} must be a matrix, got the shape {shape}; stacks of matrices need input_dim in their group, other "
            "parameters algorithm='adamw': maxmoe.optim.parameter_groups makes such groups"
        )
    if group["fused_gate"] is not None and shape[-3 - group["input_dim"]] % 2:
        raise ValueError(f"{name} must have an even number of outputs for gate and up, got the shape {shape}")


def check_state_dict(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raise unless a state dict was saved for the same parameters, algorithms and shapes, which torch does not compare.

    With moments of another shape, torch's fused AdamW reads memory that is not theirs.
    """
    foreign = next((group for group in state_dict["param_groups"] if "algorithm" not in group), None)
    if foreign is not None:
        raise ValueError(
            f"the state dict must be of maxmoe.optim.Muon, got one of an optimizer with the options "
            f"{sorted(set(foreign) - {'params', 'param_names'})}: the state of AdamW and the state of Muon cannot "
            "replace each other; load the model alone"
        )
    ours, theirs = (
        [(group["algorithm"], name) for group in found for name in group.get("param_names", ())]
        for found in (groups, state_dict["param_groups"])
    )
    if ours != theirs:
        raise ValueError(
            f"the state dict must have the parameters of the optimizer in their order, got {len(theirs)} instead of "
            f"{len(ours)}; only one of them has {', '.join(map(str, sorted({*ours} ^ {*theirs})[:8])) or 'none'}"
        )
    parameters = [parameter for group in groups for parameter in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for number, (parameter, key) in enumerate(zip(parameters, keys, strict=False)):  # torch compares their numbers
        for field, value in state_dict["state"].get(key, {}).items():
            if field != "step" and value.shape != parameter.shape:
                raise ValueError(
                    f"{field} of the parameter {ours[number][1] if ours else number} must have its shape "
                    f"{tuple(parameter.shape)}, got {tuple(value.shape)}"
                )
