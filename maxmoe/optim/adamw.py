"""AdamW on the parts of parameters that this rank holds."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from maxmoe.optim.local import local_gradient, local_part


def init_adamw_state(parameter: Tensor) -> dict[str, Tensor]:
    """Make the state before the first step, with the sharding of the parameter."""
    # A number of steps on the device would be read back on every step.
    moments = {
        name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in ("exp_avg", "exp_avg_sq")
    }
    return {"step": torch.tensor(0.0), **moments}


def adamw_step(group: Mapping[str, Any], states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Take one step of `torch.optim.AdamW`, element by element: without collectives, wherever parameters lie.

    Args:
        group: with all options.
        states: by parameter.
    """
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    values, gradients = [*map(local_part, parameters)], [*map(local_gradient, parameters)]
    # One pass over memory; it takes tensors of equal strides only.
    fused = all(x.device.type == "cpu" and x.stride() == y.stride() for x, y in zip(values, gradients, strict=True))
    adamw(
        values,
        gradients,
        [local_part(states[parameter]["exp_avg"]) for parameter in parameters],
        [local_part(states[parameter]["exp_avg_sq"]) for parameter in parameters],
        [],
        [states[parameter]["step"] for parameter in parameters],
        fused=fused or None,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
