"""Table of the names of fields and weights of each family in transformers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
        logits_index: index of the logits in the tuple that the router of the block returns.
        own_parameters: parameters of the block that `MoE` lacks.
        has_capacity: whether the router gets sequences and drops tokens of experts that are full.
        beyond_layer: what the block computes and `MoE` does not, so that its weights are not converted.
        scales_sum: whether the sparse block multiplies the sum over the experts by the factor of the routing weights.
    """

    preset: Callable[..., MoEConfig]
    fields: Mapping[str, str]
    required: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    block: Layout
    checkpoint: Layout
    returns_scores: bool = False
    logits_index: int = 0
    own_parameters: tuple[str, ...] = ()
    has_capacity: bool = False
    beyond_layer: str = ""
    scales_sum: bool = False

    def check_convertible(self) -> None:
        """Raise if a `MoE` layer computes something else than the block with the same weights."""
        if self.beyond_layer:
            raise ValueError(
                f"the blocks of {self.preset.__name__} have {self.beyond_layer}: their weights are not converted, call "
                "maxmoe.integrations.transformers.replace_moe_blocks(model)"
            )


def _without(name: str, fields: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of another family except one, which the config in transformers lacks."""
    return {ours: theirs for ours, theirs in fields.items() if ours != name}


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
_EXAONE_MOE_FIELDS = _DEEPSEEK_V3_FIELDS | {"num_experts": "num_experts", "num_shared_experts": "num_shared_experts"}
_QWEN3_5_FIELDS = _without("normalization", _QWEN2_FIELDS)
_JETMOE_FIELDS = _MIXTRAL_FIELDS | {
    "activation": "activation_function",
    "load_balance_loss_weight": "aux_loss_coef",
}
_DBRX_FIELDS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_config.ffn_hidden_size",
    "num_experts": "ffn_config.moe_num_experts",
    "top_k": "ffn_config.moe_top_k",
    "activation": "ffn_config.ffn_act_fn",
    "normalization": "ffn_config.moe_normalize_expert_weights",
    "load_balance_loss_weight": "ffn_config.moe_loss_weight",
}
_SWITCH_TRANSFORMERS_FIELDS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "d_ff",
    "num_experts": "num_experts",
    "activation": "dense_act_fn",
    "load_balance_loss_weight": "router_aux_loss_coef",
    "router_z_loss_weight": "router_z_loss_coef",
}
_KOLIBRI1_FIELDS = _without("load_balance_loss_weight", _QWEN2_FIELDS)
_BEAM_FIELDS = _without("num_shared_experts", _DEEPSEEK_V3_FIELDS) | {"num_experts": "num_experts"}
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
_GPT_OSS_FIELDS = _without("activation", _MIXTRAL_FIELDS) | {"activation_limit": "swiglu_limit"}

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

_DBRX = Layout(
    "ffn",
    (
        *router("router.layer"),
        Entry("experts.mlp.w1", ("experts.gate_proj",), transposed=True, is_flat=True),
        Entry("experts.mlp.v1", ("experts.up_proj",), transposed=True, is_flat=True),
        Entry("experts.mlp.w2", ("experts.down_proj",), is_flat=True),
    ),
)
_TWO_LINEARS = (
    Entry("input_linear.weight", ("experts.gate_proj", "experts.up_proj"), transposed=True),
    Entry("output_linear.weight", ("experts.down_proj",), transposed=True),
)
_JETMOE = Layout("mlp", router("router.layer") + _TWO_LINEARS)
_SWITCH_TRANSFORMERS = Layout(
    "mlp",
    (
        *router("router.classifier"),
        Entry("experts.expert_{expert}.wi.weight", ("experts.up_proj",), transposed=True),
        Entry("experts.expert_{expert}.wo.weight", ("experts.down_proj",), transposed=True),
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
    block=Layout("mlp", _GATE + stacked() + _SHARED),
    checkpoint=Layout("mlp", _GATE + _PROJ + _SHARED),
)
_DEEPSEEK_V3 = Family(
    preset=published.deepseek_v3,
    fields=_DEEPSEEK_V3_FIELDS,
    required={"scoring_func": ["sigmoid"], "topk_method": ["noaux_tc"]},
    block=Layout("mlp", _GATE_BIASED + stacked() + _SHARED),
    checkpoint=Layout("mlp", _GATE_BIASED + _PROJ + _SHARED),
)
_EXAONE_MOE = replace(
    _DEEPSEEK_V3,
    fields=_EXAONE_MOE_FIELDS,
    checkpoint=Layout("mlp", _GATE_BIASED_OUTSIDE + _PROJ + _SHARED),
)
_GRANITEMOE = Family(
    preset=published.granitemoe,
    fields=_MIXTRAL_FIELDS,
    block=Layout("block_sparse_moe", router("router") + stacked()),
    checkpoint=Layout("block_sparse_moe", router("router.layer") + _TWO_LINEARS),
)
_GLM4_MOE = replace(_DEEPSEEK_V3, preset=published.glm4_moe)
_OLMOE = replace(_QWEN3_MOE, preset=published.olmoe, fields=_OLMOE_FIELDS)
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
    *_SHARED[1:],
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
    "minimax": _MIXTRAL,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3_moe": _QWEN3_MOE,
    "mellum": _QWEN3_MOE,
    "qwen3_next": replace(_QWEN2_MOE, preset=published.qwen3_next),
    "qwen3_5_moe_text": replace(_QWEN2_MOE, preset=published.qwen3_next, fields=_QWEN3_5_FIELDS),
    "olmoe": _OLMOE,
    "flex_olmo": _OLMOE,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "dots1": _DEEPSEEK_V3,
    "solar_open": _DEEPSEEK_V3,
    "exaone_moe": _EXAONE_MOE,
    "kimi_k2": replace(_DEEPSEEK_V3, preset=published.kimi_k2),
    "glm4_moe": _GLM4_MOE,
    "glm4_moe_lite": _GLM4_MOE,
    "glm_moe_dsa": _GLM4_MOE,
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
        preset=published.llama4,
        fields=_MIXTRAL_FIELDS,
        block=_LLAMA4,
        checkpoint=_LLAMA4,
        returns_scores=True,
        logits_index=1,
    ),
    "granitemoe": _GRANITEMOE,
    "granitemoehybrid": _GRANITEMOE,
    "granitemoeshared": _GRANITEMOE,
    "dbrx": Family(
        preset=published.dbrx,
        fields=_DBRX_FIELDS,
        required={"ffn_config.moe_jitter_eps": [None, 0], "ffn_config.moe_normalize_expert_weights": [1, None]},
        block=_DBRX,
        checkpoint=_DBRX,
    ),
    "jetmoe": Family(
        preset=published.jetmoe,
        fields=_JETMOE_FIELDS,
        block=_JETMOE,
        checkpoint=_JETMOE,
        logits_index=4,
        own_parameters=("bias",),
        beyond_layer="a bias that is added to their output",
    ),
    "switch_transformers": Family(
        preset=published.switch_transformers,
        fields=_SWITCH_TRANSFORMERS_FIELDS,
        required={"router_jitter_noise": [0.0], "dropout_rate": [0.0], "router_bias": [False]},
        block=_SWITCH_TRANSFORMERS,
        checkpoint=_SWITCH_TRANSFORMERS,
        logits_index=2,
        has_capacity=True,
        beyond_layer="a capacity, a number of tokens of a sequence after which an expert drops further ones",
    ),
}
