import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe.checks.fields import check_bool, check_int, check_number
from maxmoe.config import MoEConfig
from maxmoe.config.components import RouterRule, ZeroComputation, component
from maxmoe.declaration import Declaration
from maxmoe.families.family import FIELDS, Family, LayerField, number_at, sizes, value_at
from maxmoe.families.layouts import Entry, Layout, router, stacked
from maxmoe.nn.rms_norm import rms_norm
from maxmoe.nn.router import Router
from maxmoe.ops import linear
from maxmoe.reference.layer import reference_rms_norm
from maxmoe.reference.routing import wide

_ROUTER = {
    "down_proj.weight": "down_weight",
    "down_proj.bias": "down_bias",
    "router_states_scale": "state_scale",
    "router_mlp.norm.weight": "norm_weight",
    "router_mlp.fc1.weight": "fc1_weight",
    "router_mlp.fc1.bias": "fc1_bias",
    "router_mlp.fc2.weight": "fc2_weight",
    "router_mlp.fc2.bias": "fc2_bias",
}


@component
class RouterMLP(RouterRule):
    """Router with hidden layers, whose state a layer returns for the next layer; see `HiddenLayers`.

    Args:
        hidden_size: R, width of the hidden layers and of the state.
        takes_state: add the state of the layer before, the argument `router_state`, to the state of the router.
        norm_eps: epsilon of the norm of the state.

    Source: ZAYA1 in transformers.
    """

    hidden_size: int
    takes_state: bool = False
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_int("hidden_size of the router", self.hidden_size, at_least=1)
        check_bool("takes_state", self.takes_state)
        check_number("norm_eps", self.norm_eps, above=0)

    @property
    def state_size(self) -> int:
        """R, width of the state."""
        return self.hidden_size

    def row_size(self, config: MoEConfig) -> int:
        """Return the width of the hidden layers."""
        return self.hidden_size

    def make(self, config: MoEConfig, **options: Any) -> Router:
        """Create the router."""
        return RouterWithMLP(config, **options)

    def reference_state(self, tokens: Tensor, parameters: Mapping[str, Tensor], previous: Tensor | None) -> Tensor:
        """Return the state ``(T, R)``, given the state of the layer before."""
        state = wide(tokens) @ wide(parameters["router.mlp.down_weight"]).T + wide(parameters["router.mlp.down_bias"])
        if not self.takes_state or previous is None:
            return state
        return state + wide(parameters["router.mlp.state_scale"]) * wide(previous)

    def reference_rows(self, tokens: Tensor, parameters: Mapping[str, Tensor], previous: Tensor | None) -> Tensor:
        """Return the hidden rows ``(T, R)``."""
        state = self.reference_state(tokens, parameters, previous)
        rows = reference_rms_norm(state, self.norm_eps) * wide(parameters["router.mlp.norm_weight"])
        for name in ("router.mlp.fc1", "router.mlp.fc2"):
            rows = rows @ wide(parameters[f"{name}_weight"]).T + wide(parameters[f"{name}_bias"])
            rows = rows * (1 + torch.erf(rows / math.sqrt(2))) / 2
        return rows


class RouterWithMLP(Router):
    """`Router` whose linear map takes the hidden rows of `HiddenLayers` instead of the tokens."""

    rule: RouterMLP

    def add_parts(self, **options: Any) -> None:
        """Add the hidden layers."""
        self.mlp = HiddenLayers(self.config.hidden_size, self.rule, **options)

    def reset_parameters(self) -> None:
        """Initialize the hidden layers too."""
        super().reset_parameters()
        self.mlp.reset_parameters()

    def hidden_rows(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the hidden rows, and the state of this layer."""
        state, rows = self.mlp(x, state)
        return rows, state

    @property
    def declaration(self) -> Declaration:
        """Declare logical names; no dim of the last map is the size of the tokens."""
        return Declaration(logical_names={**super().declaration.logical_names, "weight": (None, None)})


class HiddenLayers(nn.Module):
    """Map from tokens to the state of a router, and from the state to the input of its last map, in float32 or wider.

    state = x @ down_weight^T + down_bias + state_scale * previous
    hidden = gelu(gelu(norm(state) @ fc1_weight^T + fc1_bias) @ fc2_weight^T + fc2_bias)

    The norm is an RMS norm with a weight. If the router takes a state, `previous` is the state of the layer before.

    Args:
        size_of_tokens: D, width of the tokens.
        rule: sizes of the hidden layers.
        **options: device and dtype of the parameters.
    """

    state_scale: Tensor | None

    def __init__(self, size_of_tokens: int, rule: RouterMLP, **options: Any) -> None:
        super().__init__()
        self.norm_eps, size = rule.norm_eps, rule.hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **options))

        self.down_weight, self.down_bias = parameter(size, size_of_tokens), parameter(size)
        self.register_parameter("state_scale", parameter(size) if rule.takes_state else None)
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
            previous: ``(T, R)``, floating, state of the layer before; None for a router that takes none.

        Returns:
            State and hidden rows, float32 or wider. A row is bitwise independent of the other rows.
        """
        state = linear(x, self.down_weight, self.down_bias)
        if previous is not None and self.state_scale is not None:
            state = state + previous.to(state.dtype) * self.state_scale
        hidden = rms_norm(state, self.norm_weight.to(state.dtype), self.norm_eps)
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


def _of_config(config: Any, layer: int) -> RouterMLP:
    size, norm_eps = value_at(config, "router_hidden_size", 1), number_at(config, "rms_norm_eps", above=0)
    return RouterMLP(hidden_size=size, takes_state=layer > 0, norm_eps=norm_eps)


def _of_block(config: Any, block: Any) -> RouterMLP:
    return _of_config(config, int(block.gate.use_eda))


@Family(
    fields=FIELDS
    | {
        "intermediate_size": "moe_intermediate_size",
        "num_experts": "num_experts",
    },
    layer_fields={"router": LayerField(_of_config, _of_block)},
    block=Layout(
        "mlp",
        (
            *router("gate.router_mlp.out_proj", correction_bias="gate.balancing_biases"),
            *(
                Entry(f"gate.{theirs}", (f"router.mlp.{ours}",), is_optional=ours == "state_scale")
                for theirs, ours in _ROUTER.items()
            ),
            *stacked(),
        ),
    ),
)
def zaya() -> MoEConfig:
    """ZAYA1-8B: one of 16 experts or none, chosen by a router with hidden layers and a state from the layer before.

    The zero expert skips the layer. The first layer takes no state: ``RouterMLP(hidden_size=256)``. Layers are called
    with the state that the layer before returns.

    Source: Zyphra 2026, ZayaConfig of transformers 5.24, where the correction bias of the zero expert begins with -1;
    its update rate is not published.
    """
    return MoEConfig(
        **sizes(2048, 2048, 16, 1),
        zero_computation=ZeroComputation(zero=1),
        score_correction_bias=True,
        router=RouterMLP(hidden_size=256, takes_state=True),
        normalization="none",
    )
