"""Averages of models whose parameters are DTensors and whose buffers are plain tensors."""

import functools
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from maxmoe._torch.dtensor import LERP, set_handler


@functools.cache
def allow_averages_of_buffers() -> None:
    """Let `torch.optim.swa_utils` interpolate plain tensors and DTensors in one list, once per process."""
    set_handler(LERP, _lerp)


def _lerp(lerp: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Interpolate the local shards, which needs no communication; one by one if a placement changes."""
    averages, values, *weight = arguments
    if all(_placement(average) == _placement(value) for average, value in zip(averages, values, strict=True)):
        lerp([*map(_local, averages)], [*map(_local, values)], *weight, **options)
    else:
        for average, value in zip(averages, values, strict=True):
            average.lerp_(value, *weight, **options)


def _placement(tensor: Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
