"""Checks of the parts of a layer against its config."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from maxmoe._torch.autograd import hides_gradient
from maxmoe.adapters import adapted_module
from maxmoe.config import MoEConfig
from maxmoe.config.components import ActivationRule, RouterRule
from maxmoe.nn.losses import BalanceLoss
from maxmoe.nn.module_path import module_path
from maxmoe.nn.router import is_custom_router
from maxmoe.nn.routing import fails
from maxmoe.ops import ActivationFunction

if TYPE_CHECKING:
    from maxmoe.nn.layer import MoELayer


def check_replaced_parts(
    config: MoEConfig,
    router: nn.Module | None,
    activation: ActivationFunction | None,
    balance_loss: BalanceLoss | None,
) -> None:
    """Raise if the config contradicts what replaces a part of the layer."""
    if router is not None and not isinstance(router, nn.Module):
        raise TypeError(f"router must be a torch.nn.Module, got {type(router).__name__}")
    if router is not None and not is_custom_router(router):
        _check_router_config(config, router)
    elif router is not None:
        for name in ("router_bias", "score_correction_bias"):
            if getattr(config, name):
                raise ValueError(f"{name} must be False with a custom router, got True")
        if isinstance(config.router, RouterRule):
            raise ValueError(f"router of the config must be a name with a custom router, got {config.router}")
    if activation is not None and not callable(activation):
        raise TypeError(f"activation must be a function of gate and up, got {activation!r}: set names in the config")
    if activation is not None and config.activation_limit is not None:
        raise ValueError(f"activation_limit must be None with a custom activation, got {config.activation_limit}")
    if activation is not None and isinstance(config.activation, ActivationRule):
        raise ValueError(f"activation of the config must be a name with a custom activation, got {config.activation}")
    if balance_loss is None:
        return
    if not callable(balance_loss):
        raise TypeError(f"balance_loss must be a function as load_balance_loss, got {balance_loss!r}")
    if config.load_balance_loss_weight == 0:
        raise ValueError("balance_loss needs load_balance_loss_weight > 0, got 0")
    if config.load_balance_scope == "step":
        raise ValueError("balance_loss needs load_balance_scope 'sequence' or 'batch', got 'step'")


def needs_gradient(layer: "MoELayer", output: Tensor, lost: str) -> bool:
    """Return whether an output of a layer requires a gradient; raises if a function transform hides that it does.

    `lost` says what would be lost, and what to do, for the message.
    """
    if hides_gradient(output):
        raise NotImplementedError(
            f"{module_path(layer)}: torch.func.vmap and jvp hide that a gradient is required, so that {lost}, freeze "
            "the parameters, or call the layer under torch.no_grad"
        )
    return output.requires_grad


def _check_router_config(config: MoEConfig, router: nn.Module) -> None:
    """Raise if a `Router` was made with another config than its layer: the config says how tokens are routed."""
    of_router: Any = adapted_module(router).config
    for name in (field.name for field in dataclasses.fields(config)):
        if getattr(of_router, name) != getattr(config, name):
            raise ValueError(
                f"{name} of the config of the router must be {getattr(config, name)!r} as in the config of the layer, "
                f"got {getattr(of_router, name)!r}"
            )


def check_parts_are_known(layer: "MoELayer", what: str) -> None:
    """Raise if a layer computes what its config does not say, with a custom router or activation.

    `what` is the function that writes the weights for other libraries, which know only the config.
    """
    if is_custom_router(router := layer.part("router")):
        raise ValueError(
            f"{what} needs the router of the config, maxmoe.nn.Router, got "
            f"{type(adapted_module(router)).__name__}: other libraries would compute another function of the "
            "weights"
        )
    for name in ("experts", "shared_experts"):
        activation = getattr(adapted_module(layer.part(name) or nn.Identity()), "activation", None)
        if callable(activation):
            raise ValueError(
                f"{what} needs the activation of the config in {name}, got {activation!r}: other libraries would "
                "compute another function of the weights"
            )


def check_tokens(x: Tensor, hidden_size: int, dtype: torch.dtype) -> None:
    """Check the input of a layer ``(..., S, D)``, given the dtype of its parameters."""
    if x.dim() < 2 or x.shape[-1] != hidden_size:
        raise ValueError(f"x must have shape [..., S, hidden_size ({hidden_size})], got {tuple(x.shape)}")
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"x must have the dtype of the parameters ({dtype}) outside of autocast, got {x.dtype}")


def check_mask(token_mask: Tensor, x: Tensor) -> None:
    """Check the mask of tokens ``(..., S, D)``."""
    if token_mask.dtype != torch.bool or token_mask.shape != x.shape[:-1]:
        raise ValueError(
            f"token_mask must be bool of shape {tuple(x.shape[:-1])}, "
            f"got {token_mask.dtype} of shape {tuple(token_mask.shape)}"
        )


def checked_state(rule: RouterRule, state: Tensor | None, x: Tensor, token_mask: Tensor | None) -> Tensor:
    """Return the state of the layer before, for tokens x ``(..., S, D)``, as ``(T, R)``, with zeros for padding.

    `token_mask` is ``(T,)``. Raises if a layer has a state that it does not take, or lacks one that fits.
    """
    if state is None:
        raise ValueError(
            "router_state must be given to a layer whose router takes a state, got None: pass the router_state that "
            "the layer before has returned"
        )
    if not rule.takes_state:
        raise ValueError(f"router_state must be None for a router that takes no state, got shape {tuple(state.shape)}")
    expected = (*x.shape[:-1], rule.state_size)
    if state.shape != expected or not state.is_floating_point():
        raise ValueError(
            f"router_state must be floating of shape {tuple(expected)}, the last dim the size of the state, got "
            f"{state.dtype} of shape {tuple(state.shape)}"
        )
    state = state.reshape(-1, state.shape[-1])
    return state if token_mask is None else state.masked_fill(~token_mask.unsqueeze(1), 0.0)


def checked_ids(rule: RouterRule, ids: Tensor | None, x: Tensor, token_mask: Tensor | None) -> Tensor:
    """Return the ids that a router takes for tokens x ``(..., S, D)``, as ``(B, S)``, int64, with zeros for padding.

    `token_mask` is ``(T,)``. Raises if a layer has ids that its router does not take, or lacks ones that fit.
    """
    leading_dims = x.shape[:-1]
    got = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
    if rule.takes_ids is None:
        raise ValueError(f"router_inputs must be None for a router that takes no ids, got {got}")
    wanted = f"router_inputs must be ids of {rule.takes_ids}, which the router takes, "
    is_integer = isinstance(ids, Tensor) and not (
        ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    )
    if ids is None or not is_integer or ids.shape != leading_dims:
        raise ValueError(f"{wanted}integer of shape {tuple(leading_dims)}, got {got}")
    ids = ids.reshape(math.prod(leading_dims[:-1]), leading_dims[-1]).long().contiguous()
    if token_mask is not None:
        ids = ids.masked_fill(~token_mask.view(ids.shape), 0)
    if rule.num_ids is not None:
        is_known, wanted = (ids >= 0) & (ids < rule.num_ids), f"{wanted}in [0, {rule.num_ids})"
        if fails(is_known, wanted):
            raise ValueError(f"{wanted}, got {int(ids[~is_known][0])}")
    return ids
