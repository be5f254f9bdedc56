"""Table of the names of fields and weights of each family in transformers, and the conversion of its configs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from maxmoe.checks.fields import check_bool, check_int, check_number
from maxmoe.config import MoEConfig
from maxmoe.presets import published, published_2026
from maxmoe.presets.layouts import Entry, Layout, per_expert, router, shared, stacked, within


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models in transformers.

    Args:
        preset: preset with the values of all fields that the transformers config does not have.
        fields: attribute of the transformers config for each field of `MoEConfig`.
        required: supported values of attributes of the transformers config; the attribute may be absent.
        block: layout of the weights of the sparse block in memory.
        checkpoint: layout of the weights in published checkpoints.
        returns_scores: whether the sparse block returns a tuple, with scores that the model drops.
        scales_sum: whether the sparse block multiplies the sum over the experts by the factor of the routing weights.
    """

    preset: Callable[..., MoEConfig]
    fields: Mapping[str, str]
    required: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    block: Layout
    checkpoint: Layout
    returns_scores: bool = False
    scales_sum: bool = False


_FIELDS = {"hidden_size": "hidden_size", "top_k": "num_experts_per_tok", "activation": "hidden_act"}
_MIXTRAL_FIELDS = _FIELDS | {
    "intermediate_size": "intermediate_size",
    "num_experts": "num_local_experts",
    "load_balance_loss_weight": "router_aux_loss_coef",
}
_OLMOE_FIELDS = _MIXTRAL_FIELDS | {"num_experts": "num_experts", "normalization": "norm_topk_prob"}
_QWEN3_FIELDS = _OLMOE_FIELDS | {"intermediate_size": "moe_intermediate_size"}
_QWEN2_FIELDS = _QWEN3_FIELDS | {"num_shared_experts": "shared_expert_intermediate_size"}
_DEEPSEEK_V2_FIELDS = _FIELDS | {
    "intermediate_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "routed_scaling_factor": "routed_scaling_factor",
    "num_groups": "n_group",
    "top_k_groups": "topk_group",
}
_DEEPSEEK_V3_FIELDS = _DEEPSEEK_V2_FIELDS | {"normalization": "norm_topk_prob"}
_NEMOTRON_H_FIELDS = _DEEPSEEK_V3_FIELDS | {
    "activation": "mlp_hidden_act",
    "num_shared_experts": "moe_shared_expert_intermediate_size",
    "latent_size": "moe_latent_size",
}
_LONGCAT_FLASH_FIELDS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "expert_ffn_hidden_size",
    "num_experts": "n_routed_experts",
    "num_copy_experts": "zero_expert_num",
    "top_k": "moe_topk",
    "routed_scaling_factor": "routed_scaling_factor",
}
_KOLIBRI1_FIELDS = {ours: theirs for ours, theirs in _QWEN2_FIELDS.items() if ours != "load_balance_loss_weight"}
_BEAM_FIELDS = {ours: theirs for ours, theirs in _DEEPSEEK_V3_FIELDS.items() if ours != "num_shared_experts"}
_BEAM_FIELDS["num_experts"] = "num_experts"
_MUSE_SPARK_FIELDS = _FIELDS | {
    "intermediate_size": "moe_intermediate_size",
    "num_experts": "num_local_experts",
    "latent_size": "moe_hidden_size",
    "logit_scale": "output_multiplier",
    "routed_scaling_factor": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
    "expert_norm_eps": "post_norm_eps",
}
_INKLING_FIELDS = _FIELDS | {
    "intermediate_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "routed_scaling_factor": "route_scale",
}
_GPT_OSS_FIELDS = {ours: theirs for ours, theirs in _MIXTRAL_FIELDS.items() if ours != "activation"}
_GPT_OSS_FIELDS["activation_limit"] = "swiglu_limit"

_GATE = router("gate")
_GATE_BIASED = router("gate", correction_bias="gate.e_score_correction_bias")
_GATE_BIASED_OUTSIDE = router("gate", correction_bias="e_score_correction_bias")
_CLASSIFIER_BIASED = router("router.classifier", correction_bias="router.e_score_correction_bias")
_SHARED_GATED = (
    *shared("shared_expert"),
    Entry("shared_expert_gate.weight", ("shared_experts.output_gate",), unsqueezed=True),
)
_W123 = per_expert("w1", "w3", "w2")
_PROJ = per_expert("gate_proj", "up_proj", "down_proj")
_SHARED = shared("shared_experts")
_LLAMA4 = Layout("feed_forward", router("router") + stacked(transposed=False) + shared("shared_expert"))
_GPT_OSS = Layout(
    "mlp",
    (
        *router("router"),
        Entry("router.bias", ("router.bias",)),
        *stacked(transposed=False, interleaved=True),
        Entry("experts.gate_up_proj_bias", ("experts.gate_bias", "experts.up_bias"), interleaved=True),
        Entry("experts.down_proj_bias", ("experts.down_bias",)),
    ),
)

_MIXTRAL = Family(
    preset=published.mixtral,
    fields=_MIXTRAL_FIELDS,
    required={"router_jitter_noise": [0.0]},
    block=Layout("mlp", _GATE + stacked()),
    checkpoint=Layout("block_sparse_moe", _GATE + _W123),
)
_QWEN2_MOE = Family(
    preset=published.qwen2_moe,
    fields=_QWEN2_FIELDS,
    block=Layout("mlp", _GATE + stacked() + _SHARED_GATED),
    checkpoint=Layout("mlp", _GATE + _PROJ + _SHARED_GATED),
)
_QWEN3_MOE = Family(
    preset=published.qwen3_moe,
    fields=_QWEN3_FIELDS,
    block=Layout("mlp", _GATE + stacked()),
    checkpoint=Layout("mlp", _GATE + _PROJ),
)
_DEEPSEEK_V2 = Family(
    preset=published.deepseek_v2,
    fields=_DEEPSEEK_V2_FIELDS,
    required={
        "scoring_func": ["softmax"],
        "topk_method": ["greedy", "group_limited_greedy"],
        "norm_topk_prob": [False],
        "mlp_bias": [False],
    },
    block=Layout("mlp", _GATE + stacked() + shared("shared_experts")),
    checkpoint=Layout("mlp", _GATE + _PROJ + shared("shared_experts")),
)
_DEEPSEEK_V3 = Family(
    preset=published.deepseek_v3,
    fields=_DEEPSEEK_V3_FIELDS,
    required={"scoring_func": ["sigmoid"], "topk_method": ["noaux_tc"]},
    block=Layout("mlp", _GATE_BIASED + stacked() + shared("shared_experts")),
    checkpoint=Layout("mlp", _GATE_BIASED + _PROJ + shared("shared_experts")),
)
_LONGCAT_FLASH = Family(
    preset=published.longcat_flash,
    fields=_LONGCAT_FLASH_FIELDS,
    required={
        "hidden_act": ["silu"],
        "norm_topk_prob": [False],
        "router_bias": [False],
        "zero_expert_type": ["identity"],
    },
    # Gate and up of transformers have a matrix for each copy expert as well.
    block=Layout("mlp", _CLASSIFIER_BIASED + tuple(replace(entry, has_unused_matrices=True) for entry in stacked())),
    checkpoint=Layout("mlp", _CLASSIFIER_BIASED + _PROJ),
)
_NEMOTRON_H_BESIDE = (
    *_GATE_BIASED,
    *shared("shared_experts")[1:],
    Entry("fc1_latent_proj.weight", ("latent_in.weight",), transposed=True, is_optional=True),
    Entry("fc2_latent_proj.weight", ("latent_out.weight",), transposed=True, is_optional=True),
)
_NEMOTRON_H = Family(
    preset=published.nemotron_h,
    fields=_NEMOTRON_H_FIELDS,
    required={"mlp_bias": [False]},
    block=Layout("mixer", stacked(gated=False) + _NEMOTRON_H_BESIDE),
    checkpoint=Layout("mixer", _PROJ[1:] + _NEMOTRON_H_BESIDE),
)
_MINIMAX_M2 = replace(
    _MIXTRAL,
    preset=published.minimax_m2,
    block=Layout("mlp", _GATE_BIASED_OUTSIDE + stacked()),
    checkpoint=Layout("block_sparse_moe", _GATE_BIASED_OUTSIDE + _W123),
)

_MUSE_SPARK = Layout(
    "mlp",
    (
        *_GATE_BIASED,
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
        *_GATE_BIASED,
        Entry("gate.global_scale", ("router.scale",)),
        *stacked(),
        *(
            Entry(f"shared_experts.{name}", (f"shared_experts.{name}",), transposed=True)
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
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
    block=Layout("mlp", _GATE_BIASED + stacked() + _SHARED),
    checkpoint=Layout("", router("mlp.gate", "moe.router.expert_bias") + within("mlp", _PROJ + _SHARED)),
)
_MISTRAL_LARGE4 = Family(
    preset=published_2026.mistral_large4,
    fields=_DEEPSEEK_V2_FIELDS,
    block=Layout("mlp", _GATE + stacked() + _SHARED),
    checkpoint=Layout("", _GATE + _W123 + shared("shared_experts", "w1", "w3", "w2")),
)
_BEAM = Family(
    preset=published_2026.beam,
    fields=_BEAM_FIELDS,
    block=Layout("mlp", _GATE_BIASED + stacked()),
    checkpoint=Layout("mlp", _GATE_BIASED + _PROJ),
    scales_sum=True,
)

FAMILIES: dict[str, Family] = {
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_next": replace(_QWEN2_MOE, preset=published.qwen3_next),
    "olmoe": replace(_QWEN3_MOE, preset=published.olmoe, fields=_OLMOE_FIELDS),
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "kimi_k2": replace(_DEEPSEEK_V3, preset=published.kimi_k2),
    "glm4_moe": replace(_DEEPSEEK_V3, preset=published.glm4_moe),
    "longcat_flash": _LONGCAT_FLASH,
    "kolibri1": _KOLIBRI1,
    "axk2": replace(_DEEPSEEK_V3, preset=published_2026.axk2),
    "mistral_large4_text": _MISTRAL_LARGE4,
    "beam": _BEAM,
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
    "minimax_m2": _MINIMAX_M2,
    "nemotron_h": _NEMOTRON_H,
    "gpt_oss": Family(
        preset=published.gpt_oss,
        fields=_GPT_OSS_FIELDS,
        required={"swiglu_alpha": [1.702]},
        block=_GPT_OSS,
        checkpoint=_GPT_OSS,
        returns_scores=True,
    ),
    "llama4_text": Family(
        preset=published.llama4, fields=_MIXTRAL_FIELDS, block=_LLAMA4, checkpoint=_LLAMA4, returns_scores=True
    ),
}


def family_of(config: Any) -> Family:
    """Return the family of a transformers config, or of its `text_config` if it has one, by `model_type`."""
    model_type = getattr(_text_config(config), "model_type", None)
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type must be one of {', '.join(FAMILIES)}, got {model_type!r} ({type(config).__name__})"
        )
    return FAMILIES[model_type]


def from_transformers(config: Any) -> MoEConfig:
    """Convert the config of a transformers model to a `MoEConfig`.

    Fields that the transformers config does not have, such as the weights of some losses, are taken from the preset of
    the family. `router_aux_loss_coef` is multiplied by K, see `maxmoe/presets/published.py`.

    Args:
        config: transformers config of a family in `maxmoe.presets`, or multimodal config with a `text_config`.

    Returns:
        Config of the Mixture-of-Experts layers of the model.

    Raises:
        ValueError: for another family, and for a field that is missing, contradicts others or is not supported.
    """
    family = family_of(config)
    config = _text_config(config)
    for attribute, values in family.required.items():
        value = getattr(config, attribute, values[0])
        if value not in values:
            allowed = " or ".join(map(repr, values))
            raise ValueError(f"{attribute} of a {config.model_type} config must be {allowed}, got {value!r}")
    fields = {ours: _read(config, theirs) for ours, theirs in family.fields.items()}
    try:
        return family.preset(**fields)
    except ValueError as error:
        renamed = [
            f"{ours} is its {theirs}" for ours, theirs in family.fields.items() if ours in str(error) and ours != theirs
        ]
        raise ValueError("; ".join([f"{config.model_type} config: {error}", *renamed])) from error


def _text_config(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


def _read(config: Any, attribute: str) -> Any:
    """Return an attribute of a transformers config, converted to the value of `MoEConfig`."""
    if attribute in ("n_group", "topk_group"):
        has_none = config.model_type == "axk2" and getattr(config, attribute, None) is None
        if has_none or getattr(config, "topk_method", None) == "greedy":
            return 1
    if attribute == "moe_latent_size":
        return getattr(config, attribute, None)
    value = _get(config, attribute)
    where = f"{attribute} of the {config.model_type} config"
    match attribute:
        case "hidden_act" | "mlp_hidden_act" if isinstance(value, str):
            return {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}.get(value, value)
        case "norm_topk_prob":
            check_bool(where, value)
            return "sum" if value else "none"
        case "router_aux_loss_coef":
            check_number(where, value, at_least=0)
            return value * _get(config, "num_experts_per_tok", 1)
        case "shared_expert_intermediate_size" | "moe_shared_expert_intermediate_size":
            width, size = _get(config, attribute, 0), _get(config, "moe_intermediate_size", 1)
            if width % size:
                raise ValueError(f"{attribute} ({width}) must be a multiple of moe_intermediate_size ({size})")
            return width // size
    return value


def _get(config: Any, attribute: str, at_least: int | None = None) -> Any:
    """Return an attribute of a transformers config; with a bound, an int."""
    value = getattr(config, attribute, None)
    if value is None:
        raise ValueError(f"{attribute} is missing in the {config.model_type} config; transformers >= 5.20 has it")
    if at_least is not None:
        check_int(f"{attribute} of the {config.model_type} config", value, at_least=at_least)
    return value
