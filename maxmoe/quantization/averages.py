"""Averages of models with quantized weights: torch averages integers as floating-point numbers, and rounds down."""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from maxmoe.quantization.stack import QuantizedStack


@functools.cache
def keep_stacks_in_averages() -> None:
    """Let `update_parameters` of every `AveragedModel` copy quantized weights, once per process."""
    AveragedModel.update_parameters = _with_copies(AveragedModel.update_parameters)  # type: ignore[assignment,method-assign]


def _with_copies(update: Callable[[AveragedModel, nn.Module], None]) -> Callable[[AveragedModel, nn.Module], None]:
    @functools.wraps(update)
    @torch.no_grad()
    def updated(averages: AveragedModel, model: nn.Module) -> None:
        update(averages, model)
        for average, module in zip(averages.module.modules(), model.modules(), strict=False):
            if isinstance(average, QuantizedStack) and isinstance(module, QuantizedStack):
                average.copy_(module)

    return updated
