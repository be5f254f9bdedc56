"""Mixture-of-Experts layer that returns a tensor, in place of a dense feed-forward block."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from maxmoe.convert.blocks import family_of_block
from maxmoe.nn.checks import needs_gradient
from maxmoe.nn.layer import MoELayer
from maxmoe.nn.moe import MoE
from maxmoe.ranks.token_group import LocalTokens
from maxmoe.recompute.attached_gradient import with_gradient


class FeedForwardLayer(MoELayer):
    """Base of layers that return a tensor, and add the gradient of their auxiliary loss; see `MoEFeedForward`."""

    aux_loss_scale: float | Tensor = 1.0

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        router_state: Tensor | None = None,
        router_inputs: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the hidden states of `MoE.forward` with the same arguments, and the state of a router that has one."""
        hidden_states, routing, use = self.hidden_states_and_routing(x, token_mask, router_state, router_inputs)
        is_recorded = self.losses.are_recorded
        if torch.is_grad_enabled() or is_recorded:
            num_sequences, stats = math.prod(x.shape[:-2]), None
            # On a mesh the statistics are always computed: no rank decides by itself whether their collective runs.
            if is_recorded or self.metrics_accumulator is not None or not isinstance(self.token_group, LocalTokens):
                aux_loss, stats = self.losses_and_stats(routing, use, num_sequences)
            else:
                aux_loss = self.losses.aux_loss(routing, num_sequences)
            hidden_states = self.observed(hidden_states, routing, aux_loss, stats)
            lost = "the gradient of the auxiliary loss would be lost: use maxmoe.MoE, and add its aux_loss"
            if needs_gradient(self, aux_loss, lost):
                loss = aux_loss * self.aux_loss_scale
                hidden_states = with_gradient(hidden_states, loss, torch.ones_like(loss))
        return hidden_states if routing.state is None else (hidden_states, routing.state)


class MoEFeedForward(FeedForwardLayer, MoE):  # type: ignore[misc]
    """A `MoE` layer that returns a tensor, for models whose feed-forward blocks return one.

    The backward adds the gradient of the auxiliary loss, so that all gradients equal the gradients of

        training loss + aux_loss_scale * aux_loss

    no matter what the model does with the output. Each backward through a forward adds it: add the losses of one
    forward up, and call `backward` once. `StatsAccumulator` gives the value of the auxiliary loss and the routing
    statistics. Parameters, their names in the state dict and all other methods are the same as in `MoE`::

        block.mlp = maxmoe.MoEFeedForward(config)

    Attributes:
        aux_loss_scale: factor of the auxiliary loss, a number or a 0-dim tensor; see `set_aux_loss_scale`.
    """

    @classmethod
    def from_transformers(cls, block: nn.Module) -> Self:
        """Create a layer from the sparse block of a transformers model, as `MoE.from_transformers`, with a warning.

        A layer in the place of one block does not know the padding of the model, adds an auxiliary loss that the model
        lacks, and has parameters that transformers cannot save: `replace_moe_blocks` replaces all blocks of a model.

        Raises:
            ValueError: also for a block that returns a tuple, as in gpt-oss and Llama 4; no tensor is moved then.
        """
        if family_of_block(block).returns_scores:
            raise ValueError(
                f"{type(block).__name__} returns a tuple, which its model unpacks, MoEFeedForward a tensor: call "
                "maxmoe.integrations.transformers.replace_moe_blocks(model)"
            )
        layer = super().from_transformers(block)
        warnings.warn(
            "MoEFeedForward.from_transformers converts one block alone: in a model, it gets no attention mask, adds "
            "its own auxiliary loss, and save_pretrained writes tensors that transformers cannot read. Call "
            "maxmoe.integrations.transformers.replace_moe_blocks(model)",
            stacklevel=2,
        )
        return layer


def set_aux_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Set the factor of the auxiliary losses that layers of a model add to the gradients, for later forwards.

    These are `MoEFeedForward` layers, replaced blocks of transformers, and all layers in a `maxmoe.pipeline`. It must
    equal the factor of the mean training loss in ``backward``: 1 / n for the mean over n micro-batches, times the scale
    of a `maxmoe.parallel.GradScaler` if there is one: ``scaler.scale(torch.tensor(1 / n))``.

    Args:
        model: model with `MoEFeedForward` layers, or `Pipeline.model`.
        scale: number, or 0-dim tensor. `torch.compile` does not recompile when the value of a tensor changes.

    Raises:
        ValueError: if the model has no such layer.
    """
    layers: Any = [each for each in model.modules() if isinstance(each, MoELayer) and hasattr(each, "aux_loss_scale")]
    if not layers and not hasattr(model, "layers_of_stages"):
        raise ValueError(f"{type(model).__name__} must have layers of type MoEFeedForward, got none")
    for layer in layers:
        layer.aux_loss_scale = scale
