from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from maxmoe.checks.fields import check_bool
from maxmoe.config import MoEConfig
from maxmoe.config.components import RouterRule, Scored, Weighed, component
from maxmoe.declaration import Declaration
from maxmoe.families.family import FIELDS, Family, sizes
from maxmoe.families.layouts import GATE_BIASED, PROJECTIONS, Entry, Layout, router, stacked
from maxmoe.nn.router import Router
from maxmoe.nn.routing import Routing
from maxmoe.reference.routing import wide

_SCALE = Entry("gate.global_scale", ("router.scale",))


def _published(prefix: str, ours: str) -> tuple[Entry, ...]:
    up = Entry(f"{prefix}w13_weight", (f"{ours}.gate_proj", f"{ours}.up_proj"), transposed=True, interleaved=True)
    return up, Entry(f"{prefix}w2_weight", (f"{ours}.down_proj",), transposed=True)


@component
class SharedExpertScores(RouterRule):
    """Router with a row for each of n shared experts, as in Inkling.

    The weights are scores divided by the sum over the K selected and the n shared experts.

    Args:
        scale: multiply the weights of all experts by a trained number.

    Source: Inkling in transformers.
    """

    scale: bool = True

    scores_shared_experts: ClassVar[bool] = True
    weighs_shared_experts: ClassVar[bool] = True
    normalizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bool("scale", self.scale)

    def check(self, config: MoEConfig) -> None:
        """Raise without shared experts, and for fields that contradict a sum over sigmoids of all experts."""
        config.require_shared_experts(str(self))
        fields = {"score_function": "sigmoid", "normalization": "sum", "apply_weights_to": "output"}
        config.require(str(self), **fields, shared_expert_gate=False)

    def make(self, config: MoEConfig, **options: Any) -> Router | None:
        """Create the router with a trained number."""
        return ScaledRouter(config, **options) if self.scale else None

    def weigh(self, config: MoEConfig, weights: Tensor, of_shared: Tensor | None) -> Weighed:
        """Divide the scores by their sum."""
        assert of_shared is not None
        joint = torch.cat([weights, of_shared.sigmoid()], 1)
        joint = joint * (config.routed_scaling_factor / (joint.sum(1, keepdim=True) + 1e-20))
        weights, shared_weights = joint.tensor_split((config.top_k,), 1)
        return weights, shared_weights

    def reference_weights(self, config: MoEConfig, scored: Scored, parameters: Mapping[str, Tensor]) -> Weighed:
        """Divide the scores by their sum, and multiply them by the trained number."""
        factor, weights = config.routed_scaling_factor, scored.weights
        of_shared = factor * torch.sigmoid(scored.of_shared)
        total = (weights.sum(1, keepdim=True) + of_shared.sum(1, keepdim=True)) / factor
        scale = wide(parameters["router.scale"]) if self.scale else 1.0
        return weights / total * scale, of_shared / total * scale


class ScaledRouter(Router):
    """`Router` whose weights are multiplied by a trained `scale` ``(1,)``."""

    scale: Tensor

    def add_parts(self, **options: Any) -> None:
        """Add the scale."""
        self.scale = nn.Parameter(torch.empty(1, **options))

    def reset_parameters(self) -> None:
        """Initialize the scale to 1, all others as `Router`."""
        super().reset_parameters()
        nn.init.ones_(self.scale)

    def scaled(self, routing: Routing) -> Routing:
        """Multiply the weights of routed and shared experts."""
        return routing.scaled(self.scale)

    @property
    def declaration(self) -> Declaration:
        """Declare logical names."""
        names = super().declaration.logical_names
        return Declaration(logical_names={**names, "scale": (None,)})


@Family(
    model_types=("inkling_text",),
    fields=FIELDS
    | {
        "intermediate_size": "moe_intermediate_size",
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "routed_scaling_factor": "route_scale",
    },
    required={"shared_expert_sink": [True]},
    block=Layout(
        "mlp",
        (
            *GATE_BIASED,
            _SCALE,
            *stacked(),
            *(Entry(f"shared_experts.{name}", (f"shared_experts.{name}",), transposed=True) for name in PROJECTIONS),
        ),
    ),
    stored=Layout(
        "mlp",
        (
            *router("gate", correction_bias="gate.bias"),
            _SCALE,
            *_published("experts.", "experts"),
            *_published("shared_experts.shared_", "shared_experts"),
        ),
    ),
)
def inkling() -> MoEConfig:
    """Inkling: weights of two shared experts normalized with the weights of the six selected ones, and a trained scale.

    Source: InklingTextConfig of transformers 5.24; loss weights and the update rate of the bias are not published.
    """
    return MoEConfig(
        **sizes(6144, 3072, 256, 6),
        score_function="sigmoid",
        score_correction_bias=True,
        routed_scaling_factor=8.0,
        router=SharedExpertScores(),
        num_shared_experts=2,
    )
