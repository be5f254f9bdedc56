from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe.checks.fields import check_number
from maxmoe.config import MoEConfig
from maxmoe.config.components import ExpertNorms, RouterRule, Scored, Weighed, component
from maxmoe.declaration import Declaration
from maxmoe.families.family import Family, Field, activation, number_at, sizes
from maxmoe.families.layouts import Entry, Layout, router, stacked
from maxmoe.nn.rms_norm import rms_norm
from maxmoe.nn.router import Router
from maxmoe.nn.routing import Routing
from maxmoe.reference.layer import reference_rms_norm
from maxmoe.reference.routing import wide


@component
class NormedTokens(RouterRule):
    """Router of normalized tokens, with a trained scale of each channel and of the weights of each expert.

    logits = (x / sqrt(mean(x^2) + eps) * input_scale / sqrt(D)) @ weight^T

    Args:
        eps: epsilon of the norm.

    Source: Gemma 4 in transformers.
    """

    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_number("eps", self.eps, above=0)

    def make(self, config: MoEConfig, **options: Any) -> Router:
        """Create the router."""
        return RouterOfNormedTokens(config, **options)

    def reference_rows(self, tokens: Tensor, parameters: Mapping[str, Tensor], previous: Tensor | None) -> Tensor:
        """Normalize and scale the tokens."""
        rows = reference_rms_norm(wide(tokens), self.eps)
        scaled: Tensor = rows * wide(parameters["router.input_scale"]) * tokens.shape[1] ** -0.5
        return scaled

    def reference_weights(self, config: MoEConfig, scored: Scored, parameters: Mapping[str, Tensor]) -> Weighed:
        """Multiply the weight of each expert by its scale."""
        return scored.weights * wide(parameters["router.expert_scale"])[scored.experts], None


class RouterOfNormedTokens(Router):
    """`Router` with an `input_scale` ``(D,)`` of normalized tokens, and an `expert_scale` ``(E,)`` of the weights."""

    rule: NormedTokens
    input_scale: Tensor
    expert_scale: Tensor

    def add_parts(self, **options: Any) -> None:
        """Add the scales."""
        self.input_scale = nn.Parameter(torch.empty(self.config.hidden_size, **options))
        self.expert_scale = nn.Parameter(torch.empty(self.config.num_selectable_experts, **options))

    def reset_parameters(self) -> None:
        """Initialize the scales to 1, all others as `Router`."""
        super().reset_parameters()
        for scale in (self.input_scale, self.expert_scale):
            nn.init.ones_(scale)

    def hidden_rows(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Normalize and scale the tokens, in float32 or wider."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return rms_norm(x, self.input_scale.to(x.dtype) * x.shape[1] ** -0.5, self.rule.eps), None

    def scaled(self, routing: Routing) -> Routing:
        """Multiply the weight of each expert by its scale."""
        scales = self.expert_scale.to(routing.weights.dtype)[routing.experts.clamp_min(0)]  # -1 has a weight of 0
        return routing._replace(weights=routing.weights * scales)

    @property
    def declaration(self) -> Declaration:
        """Declare logical names."""
        names = super().declaration.logical_names
        return Declaration(logical_names={**names, "input_scale": ("norm",), "expert_scale": (None,)})


def _router(config: Any, path: str) -> NormedTokens:
    return NormedTokens(eps=number_at(config, path, above=0))


def _norms(config: Any, path: str) -> ExpertNorms:
    return ExpertNorms(input=True, sum=True, eps=number_at(config, path, above=0))


_LAYOUT = Layout(
    "",
    (
        *router("router.proj"),
        Entry("router.scale", ("router.input_scale",)),
        Entry("router.per_expert_scale", ("router.expert_scale",)),
        Entry("pre_feedforward_layernorm_2.weight", ("input_norm.weight",)),
        *stacked(),
        Entry("post_feedforward_layernorm_2.weight", ("sum_norm.weight",)),
    ),
)


@Family(
    model_types=("gemma4_text",),
    fields={
        "hidden_size": "hidden_size",
        "intermediate_size": "moe_intermediate_size",
        "num_experts": "num_experts",
        "top_k": "top_k_experts",
        "activation": Field("hidden_activation", activation),
        "router": Field("rms_norm_eps", _router),
        "expert_norms": Field("rms_norm_eps", _norms),
    },
    required={"enable_moe_block": [True]},
    block=_LAYOUT,
    lies_in_layer=True,
)
def gemma4() -> MoEConfig:
    """Gemma 4 26B-A4B: eight of 128 small experts, with norms before them, in the router, and of their sum.

    The layer is a part of the decoder layer, beside a dense block whose output is added: call `MoE.from_transformers`
    with a decoder layer. No module of transformers is the sparse block, so that none is replaced.

    Source: configs/models/gemma4-26b.yml of MaxText for the sizes, Gemma4TextConfig of transformers 5.24 for the norms;
    loss weights are not published.
    """
    return MoEConfig(
        **sizes(2816, 704, 128, 8),
        activation="gelu_tanh",
        router=NormedTokens(),
        expert_norms=ExpertNorms(input=True, sum=True, eps=1e-6),
    )
