"""Hidden layers of a router, and its state, which goes from layer to layer."""

from typing import Any

import torch
from torch import Tensor, nn

from maxmoe.config import MoEConfig
from maxmoe.declaration import Declaration
from maxmoe.nn.rms_norm import rms_norm
from maxmoe.ops import linear


class RouterMLP(nn.Module):
    """Map from tokens to the state of a router, and from the state to the input of its last map, in float32 or wider.

    state = x @ down_weight^T + down_bias + state_scale * previous
    hidden = gelu(gelu(norm(state) @ fc1_weight^T + fc1_bias) @ fc2_weight^T + fc2_bias)

    The norm is an RMS norm with a weight. With `router_takes_state`, `previous` is the state of the layer before.

    Args:
        config: config of the layer; R is its router_hidden_size.
        **options: device and dtype of the parameters.

    Source: ZAYA1 in transformers.
    """

    state_scale: Tensor | None

    def __init__(self, config: MoEConfig, **options: Any) -> None:
        super().__init__()
        assert config.router_hidden_size is not None
        self.config, size = config, config.router_hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **options))

        self.down_weight, self.down_bias = parameter(size, config.hidden_size), parameter(size)
        self.register_parameter("state_scale", parameter(size) if config.router_takes_state else None)
        self.norm_weight = parameter(size)
        self.fc1_weight, self.fc1_bias = parameter(size, size), parameter(size)
        self.fc2_weight, self.fc2_bias = parameter(size, size), parameter(size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize maps so that they preserve the variance of their input, biases to 0, scale and norm to 1."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, x: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the state of this layer and the input of the map to logits, each ``(T, R)``.

        Args:
            x: ``(T, D)``, floating, tokens.
            previous: ``(T, R)``, floating, state of the layer before; None without `router_takes_state`.

        Returns:
            State and hidden rows, float32 or wider. A row is bitwise independent of the other rows.
        """
        state = linear(x, self.down_weight, self.down_bias)
        if previous is not None and self.state_scale is not None:
            state = state + previous.to(state.dtype) * self.state_scale
        hidden = rms_norm(state, self.norm_weight.to(state.dtype), self.config.norm_eps)
        hidden = _gelu(linear(hidden, self.fc1_weight, self.fc1_bias))
        return state, _gelu(linear(hidden, self.fc2_weight, self.fc2_bias))

    @property
    def declaration(self) -> Declaration:
        """Declare logical names."""
        names: dict[str, tuple[str | None, ...]] = {
            name: (None,) * parameter.dim() for name, parameter in self.named_parameters(recurse=False)
        }
        names["down_weight"] = (None, "embed_router")
        return Declaration(logical_names=names)


def _gelu(x: Tensor) -> Tensor:
    """Compute GELU such that the bits of an element do not depend on its position; in float32, torch's do."""
    probability: Tensor = torch.special.ndtr(x)
    return x * probability


def checked_state(config: MoEConfig, state: Tensor | None, x: Tensor, token_mask: Tensor | None) -> Tensor:
    """Return the state of the layer before, for tokens x ``(..., S, D)``, as ``(T, R)``, with zeros for padding.

    `token_mask` is ``(T,)``. Raises if a layer has a state that it does not take, or lacks one that fits.
    """
    if state is None:
        raise ValueError(
            "router_state must be given to a layer with router_takes_state=True, got None: pass the router_state that "
            "the layer before has returned"
        )
    if not config.router_takes_state:
        raise ValueError(f"router_state must be None with router_takes_state=False, got shape {tuple(state.shape)}")
    expected = (*x.shape[:-1], config.router_hidden_size)
    if state.shape != expected or not state.is_floating_point():
        raise ValueError(
            f"router_state must be floating of shape {tuple(expected)}, the last dim router_hidden_size, got "
            f"{state.dtype} of shape {tuple(state.shape)}"
        )
    state = state.reshape(-1, state.shape[-1])
    return state if token_mask is None else state.masked_fill(~token_mask.unsqueeze(1), 0.0)
