"""Warning for an auxiliary loss that is not part of the training loss."""

import warnings

import torch
from torch import Tensor, nn

from maxmoe.load.stats_accumulator import is_trained
from maxmoe.nn.module_path import module_path

# Number of backward passes without a gradient of the auxiliary loss before the warning.
PATIENCE = 10


class AuxLossWatch:
    """Warns once if a layer and its router are trained, but its auxiliary loss never gets a gradient.

    A reentrant checkpoint gives all its outputs a gradient, so that a loss that is forgotten there is not noticed.
    Hooks on the two outputs of the layer count the backward passes. They are registered until the first gradient of the
    auxiliary loss. In a graph of `torch.compile` there are none, and no warning.
    """

    def __init__(self) -> None:
        self._num_backwards = 0
        self._is_over = False

    def watch(self, layer: nn.Module, hidden_states: Tensor, aux_loss: Tensor) -> None:
        """Watch the outputs of a forward of `layer`, unless one of them requires no gradient."""
        # First what is false for a plain layer.
        if not (aux_loss.requires_grad and hidden_states.requires_grad):
            return
        if torch.compiler.is_compiling() or self._is_over or not is_trained(layer):
            return
        if self._num_backwards >= PATIENCE:
            self._is_over = True
            warnings.warn(
                f"{module_path(layer)}: {PATIENCE} backward passes gave the hidden states a gradient, but none the "
                "aux_loss: add it to the training loss, use maxmoe.MoEFeedForward, or set load_balance_loss_weight and "
                "router_z_loss_weight to 0",
                stacklevel=1,  # attributed to this line, so that Python shows it once for each layer
            )
            return
        aux_loss.register_hook(self._end)  # type: ignore[no-untyped-call]
        hidden_states.register_hook(self._count)  # type: ignore[no-untyped-call]

    def _end(self, _gradient: Tensor) -> None:
        self._is_over = True

    def _count(self, _gradient: Tensor) -> None:
        self._num_backwards += 1
