"""Warnings for a training in which a loss, an update or a factor of a layer was forgotten."""

import functools
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from maxmoe._torch.autograd import backward_id
from maxmoe.expert_load.stats_accumulator import is_trained
from maxmoe.nn.module_path import module_path

if TYPE_CHECKING:
    from maxmoe.nn.layer import MoELayer

# Number of backward passes, or optimizer steps, that are watched before a warning.
PATIENCE = 10


class TrainingWatch:
    """Warns once if the first steps of a trained layer show that something was forgotten.

    1. The auxiliary loss, if it never gets a gradient. A reentrant checkpoint gives all its outputs a gradient, so that
       a loss that is forgotten there is not noticed.
    2. The factor of the auxiliary loss, where several backward passes make a step.
    3. The updates of a correction bias, and their rate while the bias is zero.

    Hooks on the outputs of the layer count the backward passes. In a graph of `torch.compile` there are none, and no
    warning.
    """

    def __init__(self) -> None:
        self._num_backwards = 0  # until the first gradient of the auxiliary loss
        self._loss_is_known = False
        self._backwards_of_steps: list[int] = []
        self._last_backward = (-1, -1)  # number of optimizer steps before it, and its own number
        self._first_bias: Tensor | None = None
        self._settings_are_known = False

    def watch(self, layer: "MoELayer", hidden_states: Tensor, aux_loss: Tensor) -> None:
        """Watch the outputs of a forward of a layer, whose hidden states require a gradient."""
        if torch.compiler.is_compiling():
            return
        watches_loss = aux_loss.requires_grad and not self._loss_is_known
        has_scale = aux_loss.requires_grad and hasattr(layer, "aux_loss_scale")
        has_default_scale = has_scale and "aux_loss_scale" not in vars(layer)  # nobody has set it
        watches_settings = (layer.config.score_correction_bias or has_default_scale) and not self._settings_are_known
        if not (watches_loss or watches_settings) or not is_trained(layer):
            return
        if watches_loss:
            self._watch_loss(layer, hidden_states, aux_loss)
        if watches_settings:
            self._watch_settings(layer, hidden_states, has_default_scale)

    def _watch_loss(self, layer: "MoELayer", hidden_states: Tensor, aux_loss: Tensor) -> None:
        if self._num_backwards < PATIENCE:
            aux_loss.register_hook(self._know_loss)  # type: ignore[no-untyped-call]
            hidden_states.register_hook(self._count_backward)  # type: ignore[no-untyped-call]
            return
        self._loss_is_known = True
        warnings.warn(
            f"{module_path(layer)}: {PATIENCE} backward passes gave the hidden states a gradient, but none the "
            "aux_loss: add it to the training loss, use maxmoe.MoEFeedForward, or set load_balance_loss_weight and "
            "router_z_loss_weight to 0",
            stacklevel=1,  # attributed to this line, so that Python shows it once for each layer
        )

    def _know_loss(self, _gradient: Tensor) -> None:
        self._loss_is_known = True

    def _count_backward(self, _gradient: Tensor) -> None:
        self._num_backwards += 1

    def _watch_settings(self, layer: "MoELayer", hidden_states: Tensor, has_default_scale: bool) -> None:
        router = layer.balanced_router
        bias = None if router is None else router.score_correction_bias
        if bias is not None and self._first_bias is None:
            self._first_bias = bias.clone()
        if len(self._backwards_of_steps) <= PATIENCE:
            _count_optimizer_steps()
            hidden_states.register_hook(self._count_backward_of_step)  # type: ignore[no-untyped-call]
            return
        self._settings_are_known = True
        if has_default_scale and (most := max(self._backwards_of_steps)) > 1:
            warnings.warn(
                f"{module_path(layer)}: {most} backward passes of an optimizer step added the auxiliary loss with the "
                f"factor 1: call maxmoe.set_aux_loss_scale with 1 / {most} if the training loss is divided by {most}, "
                "with 1 if not",
                stacklevel=1,
            )
        if bias is not None:
            self._warn_of_updates(layer, bias)

    def _count_backward_of_step(self, _gradient: Tensor) -> None:
        backward = (_optimizer_steps[0], backward_id())
        if backward[0] != self._last_backward[0]:
            self._backwards_of_steps.append(0)
        self._backwards_of_steps[-1] += backward != self._last_backward  # a shared layer is called several times
        self._last_backward = backward

    def _warn_of_updates(self, layer: "MoELayer", bias: Tensor) -> None:
        """Warn if the correction bias is as it was, unless it is meant to stay."""
        rate = layer.config.correction_bias_update_rate
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


_optimizer_steps = [0]  # of all optimizers of the process


@functools.cache
def _count_optimizer_steps() -> None:
    """Begin to count the steps of all optimizers, once per process."""
    register_optimizer_step_post_hook(_count_step)


def _count_step(*_step: object) -> None:
    _optimizer_steps[0] += 1
