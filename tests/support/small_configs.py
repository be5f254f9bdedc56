"""Configs of small models of transformers, one for each family of `maxmoe.presets`."""

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 4,
    "q_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
QWEN: dict[str, Any] = {"moe_intermediate_size": 10, "num_experts": 6, "num_experts_per_tok": 3}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}

# The preset, the folder in transformers.models, the class without "Config", "ForCausalLM" ..., and its sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("mixtral", "Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 10}),
    "qwen2_moe": ("qwen2_moe", "Qwen2Moe", QWEN | {"shared_expert_intermediate_size": 20, "norm_topk_prob": False}),
    "qwen3_moe": ("qwen3_moe", "Qwen3Moe", QWEN | {"norm_topk_prob": True}),
    "qwen3_next": ("qwen3_next", "Qwen3Next", QWEN | {"shared_expert_intermediate_size": 10, "norm_topk_prob": True}),
    "olmoe": ("olmoe", "Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 10}),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2", DEEPSEEK | GROUPS | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3", DEEPSEEK | GROUPS),
    "kimi_k2": ("deepseek_v3", "DeepseekV3", DEEPSEEK | {"n_group": 1, "topk_group": 1}),
    "glm4_moe": ("glm4_moe", "Glm4Moe", DEEPSEEK | {"n_group": 1, "topk_group": 1}),
    "longcat_flash": (
        "longcat_flash",
        "LongcatFlash",
        {
            "expert_ffn_hidden_size": 10,
            "n_routed_experts": 6,
            "zero_expert_num": 4,
            "moe_topk": 5,
            **{name: size for name, size in DEEPSEEK.items() if "_" in name and "experts" not in name},
        },
    ),
    "axk1": ("axk1", "AXK1", DEEPSEEK | GROUPS | {"head_dim": 4, "mlp_layer_types": ["sparse"] * 2}),
    "kolibri1": ("kolibri1", "Kolibri1", QWEN | {"shared_expert_intermediate_size": 20}),
    "axk2": ("axk2", "AXK2", DEEPSEEK | {"n_group": 4, "topk_group": 3}),
    "mistral_large4": ("mistral_large4", "MistralLarge4", DEEPSEEK | GROUPS),
    "beam": (
        "beam",
        "Beam",
        QWEN | GROUPS | {"num_experts": 8, "mlp_layer_types": ["sparse"] * 2},
    ),
    "step3p7": (
        "step3p7",
        "Step3p7",
        {
            "moe_intermediate_size": 10,
            "n_routed_experts": 8,
            "share_expert_dim": 20,
            "num_experts_per_tok": 3,
            "moe_router_scaling_factor": 2.5,
            "sliding_window": 8,
            "mlp_layer_types": ["sparse"] * 2,
            "swiglu_limits": [0.5, 0.0],
            "swiglu_limits_shared": [0.25, 0.75],
        },
    ),
    "muse_spark": (
        "muse_spark",
        "MuseSpark",
        {
            "moe_intermediate_size": 10,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_hidden_size": 6,
            "routed_scaling_factor": 2.5,
            "mlp_layer_types": ["sparse"] * 2,
        },
    ),
    "inkling": (
        "inkling",
        "Inkling",
        {
            "moe_intermediate_size": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "route_scale": 2.5,
            "mlp_layer_types": ["sparse"] * 2,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
        },
    ),
    "gemma4": (
        "gemma4",
        "Gemma4",
        {
            "intermediate_size": 12,
            "moe_intermediate_size": 10,
            "num_experts": 8,
            "top_k_experts": 3,
            "enable_moe_block": True,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 32,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "cohere2_moe": (
        "cohere2_moe",
        "Cohere2Moe",
        {
            "intermediate_size": 10,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        "Lfm2Moe",
        QWEN
        | {
            "num_experts": 8,
            "num_dense_layers": 0,
            "routed_scaling_factor": 2.5,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        {
            "moe_intermediate_size": 10,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 0,
            "moe_norm_min": 0.5,
        },
    ),
    "laguna": (
        "laguna",
        "Laguna",
        QWEN
        | {
            "num_experts": 8,
            "shared_expert_intermediate_size": 20,
            "moe_routed_scaling_factor": 2.5,
            "moe_router_logit_softcapping": 0.5,
            "mlp_layer_types": ["sparse"] * 2,
        },
    ),
    "zaya": (
        "zaya",
        "Zaya",
        {"moe_intermediate_size": 10, "num_experts": 8, "num_experts_per_tok": 1, "router_hidden_size": 6},
    ),
    "deepseek_v4": (
        "deepseek_v4",
        "DeepseekV4",
        {
            "moe_intermediate_size": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.5,
            "mlp_layer_types": ["moe", "hash_moe"],
            "num_key_value_heads": 1,
            "q_lora_rank": 4,
            "o_groups": 2,
            "o_lora_rank": 4,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 4,
            "hc_mult": 2,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 10},
    ),
    "nemotron_h": (
        "nemotron_h",
        "NemotronH",
        {
            "moe_intermediate_size": 10,
            "moe_shared_expert_intermediate_size": 20,
            "moe_latent_size": 6,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
        },
    ),
    "dbrx": ("dbrx", "Dbrx", {}),
    "granitemoe": (
        "granitemoe",
        "GraniteMoe",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 10},
    ),
    "jetmoe": (
        "jetmoe",
        "JetMoe",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 10, "kv_channels": 8},
    ),
    "switch_transformers": (
        "switch_transformers",
        "SwitchTransformers",
        {
            "num_experts": 6,
            "d_ff": 10,
            "d_kv": 8,
            "expert_capacity": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "decoder_start_token_id": 0,
            "router_jitter_noise": 0.0,
            "dropout_rate": 0.0,
        },
    ),
    "gpt_oss": ("gpt_oss", "GptOss", {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 10}),
    "llama4": (
        "llama4",
        "Llama4",
        {"num_local_experts": 6, "num_experts_per_tok": 1, "intermediate_size": 10, "intermediate_size_mlp": 10},
    ),
}

# Further families with the same layers as a preset.
SAME_LAYERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "minimax": ("minimax", "MiniMax", MODELS["mixtral"][2]),
    "mellum": ("mellum", "Mellum", QWEN | {"num_local_experts": 6}),
    "flex_olmo": ("flex_olmo", "FlexOlmo", MODELS["olmoe"][2]),
    "dots1": ("dots1", "Dots1", DEEPSEEK | GROUPS),
    "solar_open": ("solar_open", "SolarOpen", DEEPSEEK | GROUPS),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLite", DEEPSEEK | GROUPS | {"mlp_layer_types": ["sparse"]}),
    "granitemoeshared": (
        "granitemoeshared",
        "GraniteMoeShared",
        MODELS["granitemoe"][2] | {"shared_intermediate_size": 10},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        "GraniteMoeHybrid",
        MODELS["granitemoe"][2] | {"layer_types": ["attention"], "mamba_n_heads": 4, "mamba_d_head": 8},
    ),
    "exaone_moe": (
        "exaone_moe",
        "ExaoneMoe",
        DEEPSEEK | GROUPS | {"num_experts": 8, "num_shared_experts": 2, "mlp_layer_types": ["sparse"]},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        "Qwen3_5Moe",
        QWEN | {"shared_expert_intermediate_size": 10, "layer_types": ["full_attention"]},
    ),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsa", DEEPSEEK | GROUPS),
}

TEXT_CONFIGS = {"gemma4", "inkling", "llama4", "mistral_large4", "muse_spark", "qwen3_5_moe", "step3p7"}
# The configs of their other parts, for families that have no class for the language model with its head alone.
VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "mistral_large4": {"vision_config": VISION | {"model_type": "pixtral"}},
    "step3p7": {"vision_config": VISION},
    "muse_spark": {
        "vision_config": VISION,
        "audio_config": {"hidden_sizes": [8] * 4, "depths": [1] * 4, "out_hidden_size": 16},
        "out_hidden_size": 8,
        "projector_hidden_size": 8,
    },
}
