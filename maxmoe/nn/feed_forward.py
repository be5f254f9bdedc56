"""The Mixture-of-Experts layer in the place of a feed-forward block: a tensor in, a tensor out."""

import torch
from torch import Tensor, nn

from maxmoe.nn.accumulated_stats import with_gradient
from maxmoe.nn.moe import MoE


class MoEFeedForward(MoE):
    """A `MoE` layer that returns a tensor, for models that expect one from their feed-forward blocks.

    The auxiliary loss joins the gradients in the backward: they are those of

        training loss + aux_loss_scale * aux_loss

    whatever happens to the output in between. Its value and the statistics of the routing are in `StatsAccumulator`.
    Parameters, their names in the state dict and all other methods are those of `MoE`::

        block.mlp = maxmoe.MoEFeedForward(config)
        block.mlp = maxmoe.MoEFeedForward.from_transformers(block.mlp)

    Attributes:
        aux_loss_scale: number or 0-dim tensor, read in the forward; see `set_aux_loss_scale`.
    """

    aux_loss_scale: float | Tensor = 1.0

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Route the tokens and compute their experts.

        Args:
            x: ``(..., S, D)``, as in `MoE.forward`.
            token_mask: ``(..., S)``, bool, False for padding; None if there is none.

        Returns:
            Shape and dtype as `MoEOutput.hidden_states`.
        """
        hidden_states, aux_loss, _ = super().forward(x, token_mask)
        if not aux_loss.requires_grad:
            return hidden_states
        loss = aux_loss * self.aux_loss_scale
        return with_gradient(hidden_states, loss, torch.ones_like(loss))


def set_aux_loss_scale(model: nn.Module, scale: float | Tensor) -> None:
    """Set the factor of the auxiliary losses in all `MoEFeedForward` layers of a model, for the forwards to come.

    It must be what multiplies the mean of the training loss over the tokens before its backward: 1 / n for the mean of
    n micro-batches, times the scale of a `torch.amp.GradScaler`, which ``scaler.scale(torch.tensor(1 / n))`` gives.

    Args:
        model: of any modules.
        scale: a number, or a 0-dim tensor, for values of which `torch.compile` need not compile each anew.

    Raises:
        ValueError: if there is no such layer.
    """
    layers = [module for module in model.modules() if isinstance(module, MoEFeedForward)]
    if not layers:
        raise ValueError(f"{type(model).__name__} must have layers of type MoEFeedForward, got none")
    for layer in layers:
        layer.aux_loss_scale = scale
