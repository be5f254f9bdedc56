import math
import reprlib
from typing import Any

from maxmoe.checks.fields import check_number
from maxmoe.config import MoEConfig
from maxmoe.config.components import ActivationRule, component
from maxmoe.families.family import FIELDS, Family, Field, LayerField, PublishedModel, num_of_width, sizes, without
from maxmoe.families.layouts import GATE_BIASED, PROJECTIONS, SHARED, Layout, linears, router, shared, stacked


@component
class LimitedOutput(ActivationRule):
    """SwiGLU with min(silu(gate), limit) * clamp(up, -limit, limit), as in Step-3.7.

    Args:
        limit: limit of the routed experts; None for no clipping.
        shared_limit: limit of the shared experts; None for no clipping.

    Source: Step-3.7 in transformers.
    """

    limit: float | None = None
    shared_limit: float | None = None

    def __post_init__(self) -> None:
        for name in ("limit", "shared_limit"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)

    def check(self, config: MoEConfig) -> None:
        """Raise without a gate, with the limit of other families, and for a limit of absent experts."""
        config.require("activation=LimitedOutput(...)", gated=True, activation_limit=None)
        if self.shared_limit is not None:
            config.require_shared_experts(f"shared_limit ({self.shared_limit})")

    def arguments(self, config: MoEConfig, *, of_shared: bool) -> dict[str, Any]:
        """Return SiLU with the limit of its output."""
        limit = self.shared_limit if of_shared else self.limit
        return {"activation": "silu", "limit": limit, "limit_target": "input" if limit is None else "output"}


def _of_config(config: Any, layer: int) -> LimitedOutput:
    return _limits(*(_in_list(config, name, layer) for name in ("swiglu_limits", "swiglu_limits_shared")))


def _of_block(_config: Any, block: Any) -> LimitedOutput:
    return _limits(block.experts.limit, block.shared_experts.limit)


def _limits(*limits: Any) -> LimitedOutput:
    """Return the rule for two limits, for which there may be 0 or infinity if there is none."""
    routed, shared = (None if not limit or limit == math.inf else limit for limit in limits)
    return LimitedOutput(limit=routed, shared_limit=shared)


def _in_list(config: Any, attribute: str, layer: int) -> Any:
    """Return the element of the layer in a list of a transformers config, or None without a list."""
    values = getattr(config, attribute, None)
    if not values:
        return None
    if not isinstance(values, list | tuple) or len(values) <= layer:
        raise ValueError(
            f"{attribute} of a {config.model_type} config must be a list with an element for each of the "
            f"num_hidden_layers ({config.num_hidden_layers}) layers, got {reprlib.repr(values)}"
        )
    return values[layer]


@PublishedModel(
    "Step-3.7-Flash",
    layers=45,
    heads=(64, 8),
    vocab_size=128815,
    dense=(3, 11264),
    differs="no gates of attention, no norms of its queries and keys, full attention in all layers",
)
@Family(
    model_types=("step3p5",),
    fields=without("activation", FIELDS)
    | {
        "intermediate_size": "moe_intermediate_size",
        "num_experts": "n_routed_experts",
        "num_shared_experts": Field("share_expert_dim", num_of_width),
        "routed_scaling_factor": "moe_router_scaling_factor",
    },
    layer_fields={"activation": LayerField(_of_config, _of_block)},
    block=Layout("mlp", GATE_BIASED + stacked() + SHARED),
    stored=Layout(
        "", router("moe.gate", "moe.router_bias") + linears("moe", "experts", PROJECTIONS) + shared("share_expert")
    ),
    scales_sum=True,
)
def step3p7() -> MoEConfig:
    """Step-3.7-Flash: sigmoid scores, a correction bias, and a shared expert; the weights are multiplied by 3.

    Its last two layers have ``LimitedOutput(limit=7.0, shared_limit=16.0)``.

    Source: StepFun 2026, Step3p7TextConfig of transformers 5.24; the factor is the one of Step-3.5-Flash. The update
    rate of the bias is not published.
    """
    return MoEConfig(
        **sizes(4096, 1280, 288, 8),
        score_function="sigmoid",
        score_correction_bias=True,
        routed_scaling_factor=3.0,
        num_shared_experts=1,
        activation=LimitedOutput(),
    )
