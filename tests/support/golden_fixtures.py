"""MaxText's numbers in tests/golden, with the names of `MoEConfig` and of the layer's state dict.

They come from running MaxText's RoutedMoE (commit e591f30c) in float32 on CPU; `meta` is its configuration.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from maxmoe.config import MoEConfig

FOLDER = Path(__file__).parents[1] / "golden"
LAYERS = (
    "mixtral_sparse",
    "mixtral_dense_capacity",
    "deepseek2",
    "deepseek3",
    "deepseek3_nogroup",
    "deepseek3_shared",
    "deepseek4_sqrtsoftplus",
    "qwen3_moe",
    "gpt_oss_sparse",
    "llama4_sparse",
    "gemma4",
)
PARAMETERS = {
    "wi_0": "experts.gate_proj",
    "wi_1": "experts.up_proj",
    "wo": "experts.down_proj",
    "wi_0_bias": "experts.gate_bias",
    "wi_1_bias": "experts.up_bias",
    "wo_bias": "experts.down_bias",
    "shared_wi_0": "shared_experts.gate_proj",
    "shared_wi_1": "shared_experts.up_proj",
    "shared_wo": "shared_experts.down_proj",
}


def load(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Arrays and meta data of one fixture; integer arrays as int64."""
    arrays = dict(np.load(FOLDER / f"{name}.npz"))
    meta = json.loads(bytes(arrays.pop("meta")))
    tensors = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in arrays.items()}
    return {k: v.long() if v.dtype == torch.int32 else v for k, v in tensors.items()}, meta


def layer_config(arrays: dict[str, Tensor], meta: dict[str, Any]) -> MoEConfig:
    """Return the MoEConfig that MaxText's model name, decoder and options stand for."""
    options = meta["config"]
    words: dict[str, Any] = {
        "hidden_size": arrays["x"].shape[-1],
        "intermediate_size": arrays["wi_0"].shape[-1],
        "num_experts": options["num_experts"],
        "top_k": options["num_experts_per_tok"],
        "num_shared_experts": meta.get("shared_experts", 0),
        "expert_bias": options["mlp_bias"],
    }
    score_function = options["routed_score_func"]
    match options["decoder_block"]:
        case "deepseek" | "deepseek4":
            words["score_function"] = score_function
            words["normalization"] = "none" if score_function == "softmax" else "sum"
            words["routed_scaling_factor"] = options["routed_scaling_factor"]
            words["score_correction_bias"] = options["routed_bias"]
            if options["n_routing_groups"] > 0:
                words["num_groups"] = options["n_routing_groups"]
                words["top_k_groups"] = options["topk_routing_group"]
        case "llama4":
            words |= {"score_function": "sigmoid", "normalization": "none", "apply_weights_to": "input"}
        case "gemma4":
            words |= {"score_function": "softmax", "normalization": "sum", "activation": "gelu_tanh"}
        case _:
            words |= {"score_function": "identity", "normalization": "softmax"}
            words["router_bias"] = options["routed_bias"]
    if options["decoder_block"] == "gpt_oss":
        words["activation"] = "swigluoai"
    if options["mlp_activations_limit"] > 0:
        words["activation_limit"] = float(options["mlp_activations_limit"])
    if options["capacity_factor"] > 0:
        words |= {"implementation": "dense", "capacity_factor": options["capacity_factor"]}
    if options.get("ragged_buffer_factor", -1.0) > 0:
        words["buffer_factor"] = options["ragged_buffer_factor"]
    return MoEConfig(**words)


def layer_parameters(arrays: dict[str, Tensor], config: MoEConfig) -> dict[str, Tensor]:
    """The fixture's parameters under the names of the layer's state dict."""
    parameters = {"router.weight": arrays["gate_kernel"].T.contiguous()}
    for name, ours in PARAMETERS.items():
        if name in arrays:
            parameters[ours] = arrays[name]
    if config.router_bias:
        parameters["router.bias"] = arrays["gate_bias"]
    if config.score_correction_bias:
        parameters["router.score_correction_bias"] = arrays["gate_bias"]
    if "per_expert_scale" in arrays:
        # Gemma 4 multiplies the weights by a trained scale per expert, which is equal to scaling down_proj.
        parameters["experts.down_proj"] = arrays["wo"] * arrays["per_expert_scale"][:, None, None]
    return parameters


def expected_output(arrays: dict[str, Tensor]) -> Tensor:
    """Return the output; for several devices the output of a single device, if the fixture has it."""
    return arrays.get("out_single_device", arrays.get("out"))  # type: ignore[return-value]


def expected_gradients(arrays: dict[str, Tensor], config: MoEConfig) -> dict[str, Tensor]:
    """The gradients of the trained parameters under the same names, and of "x".

    Some gradients of several devices lack the path through the router: then the ones of plain autodiff, or of one
    device, are returned.
    """
    prefix = next(start for start in ("true_grad", "single_grad", "grad") if f"{start}_x" in arrays)
    gradients = {"x": arrays[f"{prefix}_x"], "router.weight": arrays[f"{prefix}_gate_kernel"].T}
    for name, ours in PARAMETERS.items():
        if f"{prefix}_{name}" in arrays:
            gradients[ours] = arrays[f"{prefix}_{name}"]
    if config.router_bias:
        gradients["router.bias"] = arrays[f"{prefix}_gate_bias"]
    if "per_expert_scale" in arrays:
        gradients["experts.down_proj"] = arrays["grad_wo"] / arrays["per_expert_scale"][:, None, None]
    return gradients


def balance_loss(x: Tensor, parameters: dict[str, Tensor], arrays: dict[str, Tensor], meta: dict[str, Any]) -> Tensor:
    """MaxText's balance loss, a term of the loss that its gradients belong to; ours has another definition.

    It takes the softmax of the scores with the bias, and its constant makes perfect balance K.
    """
    options = meta["config"]
    if not meta.get("lb_cotangent"):
        return x.new_zeros(())
    score = {
        "": lambda logits: logits,
        "softmax": lambda logits: logits.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda logits: functional.softplus(logits).sqrt(),
    }[options["routed_score_func"]](x @ parameters["router.weight"].T)
    for name in ("router.bias", "router.score_correction_bias"):
        if name in parameters:
            score = score + parameters[name]
    num_experts = options["num_experts"]
    probability = score.softmax(-1).mean(1)
    frequency = functional.one_hot(arrays["topk_indices"], num_experts).to(x.dtype).sum(2).mean(1)
    return (probability * frequency).mean() * num_experts**2 * options["load_balance_loss_weight"]
