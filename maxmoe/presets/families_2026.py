"""Names of fields and weights of the families of 2026; see `maxmoe/presets/families.py`."""

from typing import Any

from maxmoe.components import ExpertNorms
from maxmoe.nn.limited_output import LimitedOutput
from maxmoe.nn.router_mlp import RouterMLP
from maxmoe.nn.scaled_logits import ScaledLogits
from maxmoe.presets import published_2026
from maxmoe.presets.family import Family, LayerField, in_list, limit
from maxmoe.presets.layouts import PROJECTIONS, Entry, Layout, linears, router, shared, stacked, within
from maxmoe.presets.shared_names import (
    DEEPSEEK_V2_FIELDS,
    DEEPSEEK_V3_FIELDS,
    FIELDS,
    GATE,
    GATE_BIASED,
    PROJ,
    QWEN2_FIELDS,
    SHARED,
    W123,
    without,
)


def _limits_of_config(config: Any, layer: int) -> LimitedOutput:
    limits = (in_list(name)(config, layer) for name in ("swiglu_limits", "swiglu_limits_shared"))
    return _limits(*limits)


def _limits_of_block(_config: Any, block: Any) -> LimitedOutput:
    return _limits(block.experts.limit, block.shared_experts.limit)


def _limits(routed: Any, shared: Any) -> LimitedOutput:
    return LimitedOutput(limit=limit(routed), shared_limit=limit(shared))


def _router_mlp(config: Any, takes_state: bool) -> RouterMLP:
    return RouterMLP(hidden_size=config.router_hidden_size, takes_state=takes_state, norm_eps=config.rms_norm_eps)


_KOLIBRI1_FIELDS = without("load_balance_loss_weight", QWEN2_FIELDS)
_BEAM_FIELDS = without("num_shared_experts", DEEPSEEK_V3_FIELDS) | {"num_experts": "num_experts"}
_MUSE_SPARK_FIELDS: dict[str, Any] = FIELDS | {
    "intermediate_size": "moe_intermediate_size",
    "num_experts": "num_local_experts",
    "latent_size": "moe_hidden_size",
    "router": lambda config: ScaledLogits(scale=config.output_multiplier),
    "routed_scaling_factor": "routed_scaling_factor",
    "expert_norms": lambda config: ExpertNorms(
        latent_in=True, output=True, eps=config.rms_norm_eps, output_eps=config.post_norm_eps
    ),
}
_INKLING_FIELDS = FIELDS | {
    "intermediate_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "routed_scaling_factor": "route_scale",
}
_STEP3P7_FIELDS = without("activation", FIELDS) | {
    "intermediate_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "share_expert_dim",
    "routed_scaling_factor": "moe_router_scaling_factor",
}
_ZAYA_FIELDS = FIELDS | {
    "intermediate_size": "moe_intermediate_size",
    "num_experts": "num_experts",
}

_MUSE_SPARK = Layout(
    "mlp",
    (
        *GATE_BIASED,
        *stacked(),
        Entry("experts.post_expert_norm.weight", ("experts.norm.weight",)),
        Entry("pre_expert_proj.weight", ("latent_in.weight",), transposed=True),
        Entry("pre_expert_norm.weight", ("latent_in.norm.weight",)),
        Entry("post_expert_proj.weight", ("latent_out.weight",), transposed=True),
    ),
)
_INKLING = Layout(
    "mlp",
    (
        *GATE_BIASED,
        Entry("gate.global_scale", ("router.scale",)),
        *stacked(),
        *(Entry(f"shared_experts.{name}", (f"shared_experts.{name}",), transposed=True) for name in PROJECTIONS),
    ),
)
_INKLING_PUBLISHED = Layout(
    "mlp",
    (
        *router("gate", correction_bias="gate.bias"),
        Entry("gate.global_scale", ("router.scale",)),
        Entry("experts.w13_weight", ("experts.gate_proj", "experts.up_proj"), transposed=True, interleaved=True),
        Entry("experts.w2_weight", ("experts.down_proj",), transposed=True),
        Entry(
            "shared_experts.shared_w13_weight",
            ("shared_experts.gate_proj", "shared_experts.up_proj"),
            transposed=True,
            interleaved=True,
        ),
        Entry("shared_experts.shared_w2_weight", ("shared_experts.down_proj",), transposed=True),
    ),
)
_KOLIBRI1 = Family(
    preset=published_2026.kolibri1,
    fields=_KOLIBRI1_FIELDS,
    block=Layout("mlp", GATE_BIASED + stacked() + SHARED),
    checkpoint=Layout("", router("mlp.gate", "moe.router.expert_bias") + within("mlp", PROJ + SHARED)),
)
_MISTRAL_LARGE4 = Family(
    preset=published_2026.mistral_large4,
    fields=DEEPSEEK_V2_FIELDS,
    block=Layout("mlp", GATE + stacked() + SHARED),
    checkpoint=Layout("", GATE + W123 + shared("shared_experts", "w1", "w3", "w2")),
)
_STEP3P7 = Family(
    preset=published_2026.step3p7,
    fields=_STEP3P7_FIELDS,
    layer_fields={"activation": LayerField(_limits_of_config, _limits_of_block)},
    block=Layout("mlp", GATE_BIASED + stacked() + SHARED),
    checkpoint=Layout(
        "", router("moe.gate", "moe.router_bias") + linears("moe", "experts", PROJECTIONS) + shared("share_expert")
    ),
    scales_sum=True,
)
_BEAM = Family(
    preset=published_2026.beam,
    fields=_BEAM_FIELDS,
    block=Layout("mlp", GATE_BIASED + stacked()),
    checkpoint=Layout("mlp", GATE_BIASED + PROJ),
    scales_sum=True,
)
_ZAYA_ROUTER = {
    "down_proj.weight": "down_weight",
    "down_proj.bias": "down_bias",
    "router_states_scale": "state_scale",
    "router_mlp.norm.weight": "norm_weight",
    "router_mlp.fc1.weight": "fc1_weight",
    "router_mlp.fc1.bias": "fc1_bias",
    "router_mlp.fc2.weight": "fc2_weight",
    "router_mlp.fc2.bias": "fc2_bias",
}
_ZAYA = Layout(
    "mlp",
    (
        *router("gate.router_mlp.out_proj", correction_bias="gate.balancing_biases"),
        *(
            Entry(f"gate.{theirs}", (f"router.mlp.{ours}",), is_optional=ours == "state_scale")
            for theirs, ours in _ZAYA_ROUTER.items()
        ),
        *stacked(),
    ),
)


FAMILIES_2026: dict[str, Family] = {
    "kolibri1": _KOLIBRI1,
    "mistral_large4_text": _MISTRAL_LARGE4,
    "beam": _BEAM,
    "step3p5": _STEP3P7,
    "muse_spark_text": Family(
        preset=published_2026.muse_spark, fields=_MUSE_SPARK_FIELDS, block=_MUSE_SPARK, checkpoint=_MUSE_SPARK
    ),
    "inkling_text": Family(
        preset=published_2026.inkling,
        fields=_INKLING_FIELDS,
        required={"shared_expert_sink": [True]},
        block=_INKLING,
        checkpoint=_INKLING_PUBLISHED,
    ),
    "zaya": Family(
        preset=published_2026.zaya,
        fields=_ZAYA_FIELDS,
        layer_fields={
            "router": LayerField(
                lambda config, layer: _router_mlp(config, layer > 0),
                lambda config, block: _router_mlp(config, bool(block.gate.use_eda)),
            )
        },
        block=_ZAYA,
        checkpoint=_ZAYA,
        has_state=True,
    ),
}
