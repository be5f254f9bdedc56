import math
import reprlib
from typing import Any

from maxmoe.config import MoEConfig
from maxmoe.families.family import FIELDS, Family, Field, LayerField, PublishedModel, num_of_width, sizes, without
from maxmoe.families.layouts import GATE_BIASED, PROJECTIONS, SHARED, Layout, linears, router, shared, stacked


def _limits(attribute: str, module: str) -> LayerField:
    """Return a limit in the list of all layers, or in a module; there may be 0 or infinity if there is none."""

    def of_config(config: Any, layer: int) -> Any:
        values = getattr(config, attribute, None)
        if not values:
            return None
        if not isinstance(values, list | tuple) or len(values) <= layer:
            raise ValueError(
                f"{attribute} of a {config.model_type} config must be a list with an element for each of the "
                f"num_hidden_layers ({config.num_hidden_layers}) layers, got {reprlib.repr(values)}"
            )
        return None if values[layer] in (0, math.inf) else values[layer]

    def of_block(block: Any) -> Any:
        value = getattr(block, module).limit
        return None if value in (0, math.inf) else value

    return LayerField(of_config, of_block)


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
    layer_fields={
        "activation_limit": _limits("swiglu_limits", "experts"),
        "shared_activation_limit": _limits("swiglu_limits_shared", "shared_experts"),
    },
    block=Layout("mlp", GATE_BIASED + stacked() + SHARED),
    stored=Layout(
        "", router("moe.gate", "moe.router_bias") + linears("moe", "experts", PROJECTIONS) + shared("share_expert")
    ),
    scales_sum=True,
)
def step3p7() -> MoEConfig:
    """Step-3.7-Flash: sigmoid scores, a correction bias, and a shared expert; the weights are multiplied by 3.

    Its last two layers have ``activation_limit=7.0`` and ``shared_activation_limit=16.0``.

    Source: StepFun 2026, Step3p7TextConfig of transformers 5.24; the factor is the one of Step-3.5-Flash. The update
    rate of the bias is not published.
    """
    return MoEConfig(
        **sizes(4096, 1280, 288, 8),
        score_function="sigmoid",
        score_correction_bias=True,
        routed_scaling_factor=3.0,
        num_shared_experts=1,
        activation_limit_target="output",
        shared_activation_limit=None,
    )
