"""Names of fields and weights that several families have in transformers."""

from collections.abc import Mapping

from maxmoe.presets.layouts import PROJECTIONS, per_expert, router, shared


def without(name: str, fields: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of another family except one, which the config in transformers lacks."""
    return {ours: theirs for ours, theirs in fields.items() if ours != name}


FIELDS = {"hidden_size": "hidden_size", "top_k": "num_experts_per_tok", "activation": "hidden_act"}
MIXTRAL_FIELDS = FIELDS | {
    "intermediate_size": "intermediate_size",
    "num_experts": "num_local_experts",
    "load_balance_loss_weight": "router_aux_loss_coef",
}
OLMOE_FIELDS = MIXTRAL_FIELDS | {"num_experts": "num_experts", "normalization": "norm_topk_prob"}
QWEN3_FIELDS = OLMOE_FIELDS | {"intermediate_size": "moe_intermediate_size"}
QWEN2_FIELDS = QWEN3_FIELDS | {"num_shared_experts": "shared_expert_intermediate_size"}
DEEPSEEK_V2_FIELDS = FIELDS | {
    "intermediate_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "routed_scaling_factor": "routed_scaling_factor",
    "num_groups": "n_group",
    "top_k_groups": "topk_group",
}
DEEPSEEK_V3_FIELDS = DEEPSEEK_V2_FIELDS | {"normalization": "norm_topk_prob"}

GATE = router("gate")
GATE_BIASED = router("gate", correction_bias="gate.e_score_correction_bias")
W123 = per_expert("w1", "w3", "w2")
PROJ = per_expert(*PROJECTIONS)
SHARED = shared("shared_experts")
