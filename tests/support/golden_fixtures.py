"""MaxText's numbers in tests/golden, with the names of `MoEConfig` and of the layer's state dict.

They come from running MaxText's RoutedMoE (commit e591f30c) in float32 on CPU; `meta` is its configuration.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from maxmoe.config import MoEConfig

FOLDER = Path(__file__).parents[1] / "golden"
LOGITS: dict[str, Any] = {"score_function": "identity", "normalization": "softmax"}
DEEPSEEK3 = {"score_function": "sigmoid", "score_correction_bias": True, "routed_scaling_factor": 2.5}
# What MaxText's model name, decoder and options stand for, beside the sizes.
LAYERS: dict[str, dict[str, Any]] = {
    "mixtral_sparse": LOGITS,
    "mixtral_dense_capacity": {**LOGITS, "implementation": "dense", "capacity_factor": 1.0},
    "deepseek2": {"normalization": "none", "routed_scaling_factor": 2.0},
    "deepseek3": {**DEEPSEEK3, "num_groups": 4, "top_k_groups": 2},
    "deepseek3_nogroup": DEEPSEEK3,
    "deepseek3_shared": {**DEEPSEEK3, "num_shared_experts": 1},
    "deepseek4_sqrtsoftplus": {
        **{**DEEPSEEK3, "score_function": "sqrtsoftplus"},
        **{"routed_scaling_factor": 1.5, "activation_limit": 10.0},
    },
    "qwen3_moe": LOGITS,
    "gpt_oss_sparse": {
        **{**LOGITS, "router_bias": True, "expert_bias": True},
        **{"activation": "swigluoai", "activation_limit": 7.0},
    },
    "llama4_sparse": {"score_function": "sigmoid", "normalization": "none", "apply_weights_to": "input"},
    "gemma4": {"activation": "gelu_tanh"},
}
# Of bounded buffers on four ranks.
DROPPING = {"ep4_ring_raggedsort_trunc_drop": "ring_of_experts", "ep4_ra2a_trunc_drop": "ragged_all_to_all"}
PARAMETERS = {
    f"{shared}{theirs}{end}": f"{'shared_' if shared else ''}experts.{ours}{'_bias' if end else '_proj'}"
    for shared in ("", "shared_")
    for theirs, ours in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down"))
    for end in ("", "_bias")
}


class Layer(NamedTuple):
    """A layer, and its gradients of ``(output * cotangent).sum()`` by the names of its parameters, and of "x"."""

    config: MoEConfig
    parameters: dict[str, Tensor]
    x: Tensor
    cotangent: Tensor
    output: Tensor
    gradients: dict[str, Tensor]


def load(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Arrays and meta data of one fixture; integer arrays as int64."""
    arrays = dict(np.load(FOLDER / f"{name}.npz"))
    meta = json.loads(bytes(arrays.pop("meta")))
    tensors = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in arrays.items()}
    return {k: v.long() if v.dtype == torch.int32 else v for k, v in tensors.items()}, meta


def layer(name: str) -> Layer:
    arrays, meta = load(name)
    sizes = {
        "hidden_size": arrays["x"].shape[-1],
        "intermediate_size": arrays["wi_0"].shape[-1],
        "num_experts": meta["config"]["num_experts"],
        "top_k": meta["config"]["num_experts_per_tok"],
    }
    config = MoEConfig(**sizes, **LAYERS.get(name, {**LOGITS, "buffer_factor": 1.0}))
    scale = arrays.get("per_expert_scale", torch.ones(config.num_experts))[:, None, None]

    def named(prefix: str) -> dict[str, Tensor]:
        found = {ours: arrays[prefix + theirs] for theirs, ours in PARAMETERS.items() if prefix + theirs in arrays}
        found["router.weight"] = arrays[f"{prefix}gate_kernel"].T.contiguous()
        if config.router_bias:
            found["router.bias"] = arrays[f"{prefix}gate_bias"]
        return found

    parameters = named("")
    # Some gradients of several devices lack the path through the router; plain autodiff has it.
    gradients = {"x": arrays.get("true_grad_x", arrays.get("grad_x"))} | named(
        "true_grad_" if "true_grad_x" in arrays else "grad_"
    )
    # Gemma 4 multiplies the weights by a trained scale per expert, which is equal to scaling down_proj.
    parameters["experts.down_proj"] = parameters["experts.down_proj"] * scale
    if "experts.down_proj" in gradients:
        gradients["experts.down_proj"] = gradients["experts.down_proj"] / scale
    if config.score_correction_bias:
        parameters["router.score_correction_bias"] = arrays["gate_bias"]
    x = arrays["x"].clone().requires_grad_()
    weight = parameters["router.weight"].clone().requires_grad_()
    bias = arrays.get("gate_bias", torch.zeros(config.num_experts)).clone().requires_grad_()
    if meta.get("lb_cotangent"):
        balance_loss(x @ weight.T, bias, arrays["topk_indices"], meta["config"]).backward()
        for key, leaf in (("x", x), ("router.weight", weight), ("router.bias", bias)):
            if key in gradients and leaf.grad is not None:
                gradients[key] = gradients[key] - leaf.grad
    return Layer(config, parameters, arrays["x"], arrays["cotangent"], arrays["out"], gradients)


def balance_loss(logits: Tensor, bias: Tensor, experts: Tensor, options: dict[str, Any]) -> Tensor:
    """MaxText's balance loss, a term of the loss that its gradients belong to; ours has another definition.

    It takes the softmax of the scores with the bias, and its constant makes perfect balance K.
    """
    functions = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "sqrtsoftplus": softplus_root}
    score = functions.get(options["routed_score_func"], lambda x: x)(logits) + bias
    probability = score.softmax(-1).mean(1)
    frequency = functional.one_hot(experts, options["num_experts"]).to(score.dtype).sum(2).mean(1)
    return (probability * frequency).mean() * options["num_experts"] ** 2 * options["load_balance_loss_weight"]


def softplus_root(logits: Tensor) -> Tensor:
    return functional.softplus(logits).sqrt()
