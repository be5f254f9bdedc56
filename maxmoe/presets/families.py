"""Table of the names of fields and weights of each family in transformers."""

from dataclasses import replace
from typing import Any

from maxmoe.components import ZeroComputation
from maxmoe.presets import published, published_2026
from maxmoe.presets.families_2026 import FAMILIES_2026
from maxmoe.presets.family import Family
from maxmoe.presets.layouts import Entry, Layout, router, shared, stacked
from maxmoe.presets.shared_names import (
    DEEPSEEK_V2_FIELDS,
    DEEPSEEK_V3_FIELDS,
    GATE,
    GATE_BIASED,
    MIXTRAL_FIELDS,
    OLMOE_FIELDS,
    PROJ,
    QWEN2_FIELDS,
    QWEN3_FIELDS,
    SHARED,
    W123,
    without,
)

_NEMOTRON_H_FIELDS = DEEPSEEK_V3_FIELDS | {
    "activation": "mlp_hidden_act",
    "num_shared_experts": "moe_shared_expert_intermediate_size",
    "latent_size": "moe_latent_size",
}
_LONGCAT_FLASH_FIELDS: dict[str, Any] = {
    "hidden_size": "hidden_size",
    "intermediate_size": "expert_ffn_hidden_size",
    "num_experts": "n_routed_experts",
    "zero_computation": lambda config: ZeroComputation(copy=config.zero_expert_num),
    "top_k": "moe_topk",
    "routed_scaling_factor": "routed_scaling_factor",
}
_EXAONE_MOE_FIELDS = DEEPSEEK_V3_FIELDS | {"num_experts": "num_experts", "num_shared_experts": "num_shared_experts"}
_QWEN3_5_FIELDS = without("normalization", QWEN2_FIELDS)
_JETMOE_FIELDS = MIXTRAL_FIELDS | {
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
_GPT_OSS_FIELDS = without("activation", MIXTRAL_FIELDS) | {"activation_limit": "swiglu_limit"}

_GATE_BIASED_OUTSIDE = router("gate", correction_bias="e_score_correction_bias")
_CLASSIFIER_BIASED = router("router.classifier", correction_bias="router.e_score_correction_bias")
_SHARED_GATED = (
    *shared("shared_expert"),
    Entry("shared_expert_gate.weight", ("shared_experts.output_gate",), unsqueezed=True),
)
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
    fields=MIXTRAL_FIELDS,
    required={"router_jitter_noise": [0.0]},
    block=Layout("mlp", GATE + stacked()),
    checkpoint=Layout("block_sparse_moe", GATE + W123),
)
_QWEN2_MOE = Family(
    preset=published.qwen2_moe,
    fields=QWEN2_FIELDS,
    block=Layout("mlp", GATE + stacked() + _SHARED_GATED),
    checkpoint=Layout("mlp", GATE + PROJ + _SHARED_GATED),
)
_QWEN3_MOE = Family(
    preset=published.qwen3_moe,
    fields=QWEN3_FIELDS,
    block=Layout("mlp", GATE + stacked()),
    checkpoint=Layout("mlp", GATE + PROJ),
)
_DEEPSEEK_V2 = Family(
    preset=published.deepseek_v2,
    fields=DEEPSEEK_V2_FIELDS,
    required={
        "scoring_func": ["softmax"],
        "topk_method": ["greedy", "group_limited_greedy"],
        "norm_topk_prob": [False],
        "mlp_bias": [False],
    },
    block=Layout("mlp", GATE + stacked() + SHARED),
    checkpoint=Layout("mlp", GATE + PROJ + SHARED),
)
_DEEPSEEK_V3 = Family(
    preset=published.deepseek_v3,
    fields=DEEPSEEK_V3_FIELDS,
    required={"scoring_func": ["sigmoid"], "topk_method": ["noaux_tc"]},
    block=Layout("mlp", GATE_BIASED + stacked() + SHARED),
    checkpoint=Layout("mlp", GATE_BIASED + PROJ + SHARED),
)
_EXAONE_MOE = replace(
    _DEEPSEEK_V3,
    fields=_EXAONE_MOE_FIELDS,
    checkpoint=Layout("mlp", _GATE_BIASED_OUTSIDE + PROJ + SHARED),
)
_GRANITEMOE = Family(
    preset=published.granitemoe,
    fields=MIXTRAL_FIELDS,
    block=Layout("block_sparse_moe", router("router") + stacked()),
    checkpoint=Layout("block_sparse_moe", router("router.layer") + _TWO_LINEARS),
)
_GLM4_MOE = replace(_DEEPSEEK_V3, preset=published.glm4_moe)
_OLMOE = replace(_QWEN3_MOE, preset=published.olmoe, fields=OLMOE_FIELDS)
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
    checkpoint=Layout("mlp", _CLASSIFIER_BIASED + PROJ),
)
_NEMOTRON_H_BESIDE = (
    *GATE_BIASED,
    *SHARED[1:],
    Entry("fc1_latent_proj.weight", ("latent_in.weight",), transposed=True, is_optional=True),
    Entry("fc2_latent_proj.weight", ("latent_out.weight",), transposed=True, is_optional=True),
)
_NEMOTRON_H = Family(
    preset=published.nemotron_h,
    fields=_NEMOTRON_H_FIELDS,
    required={"mlp_bias": [False]},
    block=Layout("mixer", stacked(gated=False) + _NEMOTRON_H_BESIDE),
    checkpoint=Layout("mixer", PROJ[1:] + _NEMOTRON_H_BESIDE),
)
_MINIMAX_M2 = replace(
    _MIXTRAL,
    preset=published.minimax_m2,
    block=Layout("mlp", _GATE_BIASED_OUTSIDE + stacked()),
    checkpoint=Layout("block_sparse_moe", _GATE_BIASED_OUTSIDE + W123),
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
    "axk2": replace(_DEEPSEEK_V3, preset=published_2026.axk2),
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
        fields=MIXTRAL_FIELDS,
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
    **FAMILIES_2026,
}
