"""Initialization of a `maxmoe.MoE` layer from a dense feed-forward block.

The dense block of width W is cut into W / F slices of F channels, whose outputs add up to its output. Shared experts
hold the first slices. Each run of consecutive routed experts that holds every other slice once is a virtual group. The
router has one row for all experts of a virtual group, so that a token that selects one of them selects them all.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor, nn

from maxmoe.checks.fields import check_number
from maxmoe.config import MoEConfig
from maxmoe.ops import route

Scaling: TypeAlias = Literal["down_proj", "all", "none"]

# Projection of a dense block: a module, or its weight (out, in).
Projection: TypeAlias = nn.Linear | Tensor

_BIASES = {"gate_proj": "gate_bias", "up_proj": "up_bias", "down_proj": "down_bias"}

Layer = TypeVar("Layer")


@torch.no_grad()
def upcycled(
    make: Callable[..., Layer],
    config: MoEConfig,
    projections: Mapping[str, Projection | None],
    *,
    scaling: Scaling,
    noise: float,
    reinitialized: float,
) -> Layer:
    """Return a layer that `make` creates from its config, made of a dense block; see `maxmoe.MoE.from_dense`."""
    block = _tensors_of(config, projections)
    up, size = block["up_proj"], config.intermediate_size
    num_slices = _num_slices(config, up.shape[1], [name for name in _BIASES.values() if name in block])
    if scaling not in get_args(Scaling):
        raise ValueError(f"scaling must be one of {get_args(Scaling)}, got {scaling!r}")
    check_number("noise", noise, at_least=0)
    check_number("reinitialized", reinitialized, at_least=0)
    if reinitialized > 1:
        raise ValueError(f"reinitialized must be a fraction of at most 1, got {reinitialized}")
    # Factor of the experts' outputs for which the layer computes the output of the dense block. A virtual group
    # contributes its weight, the same for all slices, times the output of the block.
    output_scale = 1.0 if scaling == "none" else num_slices / _sum_of_weights(config)
    scales = _scales(config, scaling, output_scale)
    layer: Any = make(config, device=up.device, dtype=up.dtype)
    experts = dict(layer.experts.named_parameters(recurse=False))
    for expert in range(config.num_experts):
        # A copy of one expert at a time, because a model may have thousands.
        start = (config.num_shared_experts + expert % num_slices) * size
        channels = _channels(block, start, start + size)
        tensors = {name: tensor * scales.get(name, 1.0) for name, tensor in channels.items()}
        _draw_channels(tensors, reinitialized)
        for name, tensor in tensors.items():
            if noise and name in _BIASES:
                tensor += noise * tensor.std(correction=0) * torch.randn_like(tensor)
            experts[name][expert] = tensor
    if "down_bias" in block:
        experts["down_bias"][:] = block["down_bias"] * (output_scale / num_slices)
    of_groups = layer.router.weight[: config.num_experts : num_slices]
    layer.router.weight[: config.num_experts] = of_groups.repeat_interleave(num_slices, 0)
    if layer.shared_experts is not None:
        _initialize_shared(layer.shared_experts, _channels(block, 0, config.num_shared_experts * size), scaling)
    made: Layer = layer
    return made


def _initialize_shared(shared: Any, channels: Mapping[str, Tensor], scaling: Scaling) -> None:
    for name, tensor in channels.items():
        shared.get_parameter(name).copy_(tensor)
    if shared.output_gate is not None:
        shared.output_gate.zero_()  # the gate is sigmoid(0) = 1 / 2 for every token
        if scaling != "none":
            shared.down_proj.mul_(2.0)


def _scales(config: MoEConfig, scaling: Scaling, output_scale: float) -> dict[str, float]:
    """Return the factors of the tensors of an expert, by name."""
    if scaling != "all":
        return {"down_proj": output_scale}
    # The number of scaled matrices whose product an output is, for an activation that is linear for large inputs.
    num_factors = 3 if config.gated or config.activation == "relu2" else 2
    return dict.fromkeys((*_BIASES, "gate_bias", "up_bias"), output_scale ** (1 / num_factors))


def _channels(block: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Return views of the matrices and biases of some channels, by name; without the bias of the output."""
    tensors = {name: tensor[..., start:stop] for name, tensor in block.items() if name != "down_bias"}
    return {**tensors, "down_proj": block["down_proj"][start:stop]}


def _num_slices(config: MoEConfig, width: int, biases: Collection[str]) -> int:
    """Return the slices of the routed experts; raises unless a layer with the config can hold a block of the width."""
    if width % config.intermediate_size:
        raise ValueError(
            f"intermediate_size ({config.intermediate_size}) must divide the width of the dense block ({width})"
        )
    slices = width // config.intermediate_size
    num_slices = slices - config.num_shared_experts
    if num_slices <= 0:
        raise ValueError(
            f"num_shared_experts ({config.num_shared_experts}) must be below the number of slices of "
            f"intermediate_size that the dense block has ({slices}), because the routed experts hold the others"
        )
    experts_per_group = config.num_experts // config.num_groups
    multiples = {"num_experts": config.num_experts, "top_k": config.top_k}
    for name, value in {**multiples, "num_experts / num_groups": experts_per_group}.items():
        if value % num_slices:
            raise ValueError(
                f"{name} ({value}) must be a multiple of the number of slices that the routed experts hold "
                f"({num_slices})"
            )
    for name, wanted, reason in (
        ("apply_weights_to", "output", "the output of an expert is not linear in its input"),
        ("latent_size", None, "the experts must read whole tokens, as the dense block does"),
    ):
        if (got := getattr(config, name)) != wanted:
            raise ValueError(f"from_dense needs {name}={wanted!r}, got {got!r}: {reason}")
    if config.norms.input or config.norms.sum or config.norms.output:
        raise ValueError(f"from_dense needs experts without norms, got {config.expert_norms}")
    if config.router_rule.weighs_shared_experts:
        raise ValueError(f"from_dense needs shared experts without weights of the router, got router={config.router}")
    if config.router_rule.takes_ids is not None:
        raise ValueError(f"from_dense needs a router that selects all slices or none, by scores, got {config.router}")
    if config.num_selectable_experts > config.num_experts:
        raise ValueError(
            "from_dense needs a config without zero, copy and constant experts, which do not compute the dense block, "
            f"got {config.num_selectable_experts - config.num_experts}"
        )
    if biases and not config.expert_bias:
        raise ValueError(f"the dense block has {', '.join(biases)}: expert_bias must be True, got False")
    if config.num_shared_experts and {*biases} - {"down_bias"}:
        raise ValueError(
            f"the dense block has {', '.join(biases)}, and shared experts have no biases: num_shared_experts must be "
            f"0, got {config.num_shared_experts}"
        )
    return num_slices


def _sum_of_weights(config: MoEConfig) -> float:
    """Return the sum of the routing weights of a token: exact if they are normalized, else for logits of zero."""
    if config.normalization != "none":
        return config.routed_scaling_factor
    weights, _, _ = route(
        torch.zeros(1, config.num_experts),
        config.top_k,
        score_function=config.score_function,
        normalization=config.normalization,
        scale=config.routed_scaling_factor,
    )
    total = float(weights.sum())
    if total == 0:
        raise ValueError(
            f"score_function={config.score_function!r} with normalization='none' gives routing weights around 0, by "
            "which no scale can divide: set scaling='none', or another normalization"
        )
    return total


def _draw_channels(tensors: Mapping[str, Tensor], fraction: float) -> None:
    """Draw random channels of an expert anew, from normal distributions with the mean and deviation of these channels.

    Source: drop-upcycling, arXiv:2502.19261 section 3.
    """
    size = tensors["up_proj"].shape[1]
    channels = torch.randperm(size, device=tensors["up_proj"].device)[: round(fraction * size)]
    if not len(channels):
        return
    for name in (name for name in _BIASES if name in tensors):
        dim = 0 if name == "down_proj" else 1
        chosen = tensors[name].index_select(dim, channels)
        drawn = torch.randn_like(chosen) * chosen.std(correction=0) + chosen.mean()
        tensors[name].index_copy_(dim, channels, drawn)


def _tensors_of(config: MoEConfig, projections: Mapping[str, Projection | None]) -> dict[str, Tensor]:
    """Return the tensors of a dense block in the layout of experts: matrices (in, out) and biases (out,), by name.

    Raises unless they fit each other and the config, with one dtype and device.
    """
    if not isinstance(config, MoEConfig):
        raise TypeError(f"config must be a maxmoe.MoEConfig, got {type(config).__name__}")
    gate = projections["gate_proj"]
    if (gate is not None) != config.gated:
        wanted, got = "given" if config.gated else "None", None if gate is None else type(gate).__name__
        raise ValueError(f"gate_proj must be {wanted} with gated={config.gated}, got {got}")
    weights: dict[str, Tensor] = {}
    for name, each in projections.items():
        weight = each.weight if isinstance(each, nn.Linear) else each
        if weight is None and name == "gate_proj":
            continue
        if not isinstance(weight, Tensor):
            raise TypeError(f"{name} must be a torch.nn.Linear or its weight, got {type(each).__name__}")
        if weight.dim() != 2 or not weight.is_floating_point():
            got = f"{weight.dtype} of shape {tuple(weight.shape)}"
            raise ValueError(f"{name} must be a floating matrix (out, in), got {got}")
        weights[name] = weight
    up, size = weights["up_proj"], config.hidden_size
    for name, weight in {"up_proj": up, **weights}.items():  # first what gives the width
        expected = (size, up.shape[0]) if name == "down_proj" else (up.shape[0], size)
        if weight.shape != expected:
            raise ValueError(
                f"{name} must have shape {expected}, which is (out, in) as in torch.nn.Linear, with hidden_size "
                f"({size}) and the width of up_proj ({up.shape[0]}), got {tuple(weight.shape)}"
            )
        if (weight.dtype, weight.device) != (up.dtype, up.device):
            raise ValueError(
                f"{name} must be {up.dtype} on {up.device} as up_proj is, got {weight.dtype} on {weight.device}"
            )
    linears = {_BIASES[name]: each for name, each in projections.items() if isinstance(each, nn.Linear)}
    biases = {name: each.bias.detach() for name, each in linears.items() if each.bias is not None}
    return {name: weight.detach().mT for name, weight in weights.items()} | biases
