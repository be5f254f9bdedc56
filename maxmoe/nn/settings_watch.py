"""Warnings for settings of a trained layer that have no effect, or another one than was meant."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from maxmoe._torch_backward import backward_id
from maxmoe.load.stats_accumulator import is_trained
from maxmoe.nn.module_path import module_path

# Number of optimizer steps that are watched before the warning.
PATIENCE = 10


class SettingsWatch:
    """Warns once if the first optimizer steps of a trained layer show that a setting was forgotten.

    These are the updates of a correction bias, its rate while it is zero, and the factor of the auxiliary loss where
    several backward passes make a step. A hook on the output of the layer counts the backward passes of each step. In a
    graph of `torch.compile` there is none, and no warning.
    """

    def __init__(self) -> None:
        self._num_backwards: list[int] = []  # of each optimizer step
        self._last_backward = (-1, -1)  # number of optimizer steps before it, and its own number
        self._first_bias: Tensor | None = None
        self._is_over = False

    def watch(self, layer: Any, hidden_states: Tensor, aux_loss: Tensor) -> None:
        """Watch the outputs of a forward of a `MoE` layer, whose hidden states require a gradient."""
        if torch.compiler.is_compiling() or self._is_over:
            return
        has_bias, has_default_scale = layer.config.score_correction_bias, _has_default_scale(layer, aux_loss)
        if not (has_bias or has_default_scale) or not is_trained(layer):
            return
        if has_bias and self._first_bias is None:
            self._first_bias = layer.balanced_router.score_correction_bias.clone()
        if len(self._num_backwards) <= PATIENCE:
            _count_optimizer_steps()
            hidden_states.register_hook(self._count)  # type: ignore[no-untyped-call]
            return
        self._is_over = True
        if has_default_scale and (most := max(self._num_backwards)) > 1:
            # Attributed to this line, as below, so that Python shows it once for each layer.
            warnings.warn(
                f"{module_path(layer)}: {most} backward passes of an optimizer step added the auxiliary loss with the "
                f"factor 1: call maxmoe.set_aux_loss_scale with 1 / {most} if the training loss is divided by {most}, "
                "with 1 if not",
                stacklevel=1,
            )
        if has_bias:
            self._warn_of_updates(layer)

    def _warn_of_updates(self, layer: Any) -> None:
        """Warn if the correction bias is as it was, unless it is meant to stay."""
        bias, rate = layer.balanced_router.score_correction_bias, layer.config.correction_bias_update_rate
        assert self._first_bias is not None
        if not torch.equal(bias, self._first_bias.to(bias.device)):
            return
        if rate > 0:
            warnings.warn(
                f"{module_path(layer)}: {PATIENCE} optimizer steps have not changed score_correction_bias, whose "
                f"correction_bias_update_rate is {rate}: call update of a maxmoe.StatsAccumulator after each step, or "
                "set the rate to 0",
                stacklevel=1,
            )
        elif not bias.any():
            warnings.warn(
                f"{module_path(layer)}: score_correction_bias is zero after {PATIENCE} optimizer steps, and nothing "
                "updates it: set correction_bias_update_rate, load a bias, or set score_correction_bias to False",
                stacklevel=1,
            )

    def _count(self, _gradient: Tensor) -> None:
        backward = (_optimizer_steps[0], backward_id())
        if backward[0] != self._last_backward[0]:
            self._num_backwards.append(0)
        self._num_backwards[-1] += backward != self._last_backward  # a shared layer is called several times
        self._last_backward = backward


def _has_default_scale(layer: Any, aux_loss: Tensor) -> bool:
    """Return whether a layer adds its auxiliary loss with a factor that nobody has set."""
    return aux_loss.requires_grad and hasattr(layer, "aux_loss_scale") and "aux_loss_scale" not in vars(layer)


_optimizer_steps = [0]  # of all optimizers of the process


@functools.cache
def _count_optimizer_steps() -> None:
    """Begin to count the steps of all optimizers, once per process."""
    register_optimizer_step_post_hook(_count_step)


def _count_step(*_step: object) -> None:
    _optimizer_steps[0] += 1
