"""Checks of what a layer is made of and called with."""

import torch
from torch import Tensor, nn

from maxmoe.config import MoEConfig
from maxmoe.nn.losses import BalanceLoss
from maxmoe.ops import ActivationFunction


def check_inputs(x: Tensor, token_mask: Tensor | None, hidden_size: int, dtype: torch.dtype) -> None:
    """Raise unless x is ``(..., S, hidden_size)`` with this dtype, or under autocast, and the mask has its shape."""
    if x.dim() < 2 or x.shape[-1] != hidden_size:
        raise ValueError(f"x must have shape [..., S, hidden_size ({hidden_size})], got {tuple(x.shape)}")
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"x must have the dtype of the parameters ({dtype}) outside of autocast, got {x.dtype}")
    if token_mask is not None and (token_mask.dtype != torch.bool or token_mask.shape != x.shape[:-1]):
        raise ValueError(
            f"token_mask must be bool of shape {tuple(x.shape[:-1])}, "
            f"got {token_mask.dtype} of shape {tuple(token_mask.shape)}"
        )


def check_replaced_parts(
    config: MoEConfig,
    router: nn.Module | None,
    activation: ActivationFunction | None,
    balance_loss: BalanceLoss | None,
) -> None:
    """Raise if the config contradicts what replaces a part of the layer."""
    if router is not None and not isinstance(router, nn.Module):
        raise TypeError(f"router must be a torch.nn.Module, got {type(router).__name__}")
    for name in ("router_bias", "score_correction_bias") if router is not None else ():
        if getattr(config, name):
            raise ValueError(f"{name} must be False with a router of one's own, got True")
    if activation is not None and not callable(activation):
        raise TypeError(f"activation must be a function of gate and up, got {activation!r}: set names in the config")
    if activation is not None and config.activation_limit is not None:
        raise ValueError(
            f"activation_limit must be None with an activation of one's own, got {config.activation_limit}"
        )
    if balance_loss is None:
        return
    if config.load_balance_loss_weight == 0:
        raise ValueError("balance_loss needs load_balance_loss_weight > 0, got 0")
    if config.load_balance_scope == "step":
        raise ValueError("balance_loss needs load_balance_scope 'sequence' or 'batch', got 'step'")
