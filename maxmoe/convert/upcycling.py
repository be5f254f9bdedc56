"""Initialization of a `maxmoe.MoE` layer from a dense feed-forward block.

The dense block of width W is cut into W / F slices of F channels, whose outputs add up to its output. Shared experts
hold the first slices. Each run of consecutive routed experts that holds every other slice once is a virtual group. The
router has one row for all experts of a virtual group, so that a token that selects one of them selects them all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from maxmoe.checks.fields import check_number
from maxmoe.config import MoEConfig
from maxmoe.ops import route

Scaling: TypeAlias = Literal["down_proj", "all", "none"]

# Projection of a dense block: a module, or its weight (out, in).
Projection: TypeAlias = nn.Linear | Tensor

_BIASES = {"gate_proj": "gate_bias", "up_proj": "up_bias", "down_proj": "down_bias"}


@dataclass(frozen=True)
class DenseBlock:
    """A dense block in the layout of experts, and how a layer with a config holds it.

    Args:
        config: config of the layer.
        matrices: `gate_proj` and `up_proj` ``(D, W)``, `down_proj` ``(W, D)``, by name.
        biases: `gate_bias` and `up_bias` ``(W,)``, `down_bias` ``(D,)``, by name, those that the block has.
    """

    config: MoEConfig
    matrices: Mapping[str, Tensor]
    biases: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, config: MoEConfig, gate_proj: Projection | None, up_proj: Projection, down_proj: Projection
    ) -> "DenseBlock":
        """Return the dense block with these projections; raises unless a layer with the config can hold it."""
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config must be a maxmoe.MoEConfig, got {type(config).__name__}")
        given = {"gate_proj": gate_proj, "up_proj": up_proj, "down_proj": down_proj}
        if (gate_proj is not None) != config.gated:
            wanted = "given" if config.gated else "None"
            raise ValueError(
                f"gate_proj must be {wanted} with gated={config.gated}, got "
                f"{None if gate_proj is None else type(gate_proj).__name__}"
            )
        weights = {name: _weight(name, each) for name, each in given.items() if each is not None or name != "gate_proj"}
        _check_weights(config, weights)
        linears = {name: each for name, each in given.items() if isinstance(each, nn.Linear)}
        biases = {_BIASES[name]: each.bias.detach() for name, each in linears.items() if each.bias is not None}
        block = cls(config, {name: weight.detach().mT for name, weight in weights.items()}, biases)
        block._check_config()
        return block

    @property
    def width(self) -> int:
        """W, width of the dense block."""
        return self.matrices["up_proj"].shape[1]

    @property
    def num_slices(self) -> int:
        """Number of slices that the routed experts hold, the size of a virtual group."""
        return self.width // self.config.intermediate_size - self.config.num_shared_experts

    def slice(self, expert: int) -> dict[str, Tensor]:
        """Return views of the matrices and biases of a routed expert, by name; without the bias of the output."""
        size = self.config.intermediate_size
        start = (self.config.num_shared_experts + expert % self.num_slices) * size
        return self._channels(start, start + size)

    def shared(self) -> dict[str, Tensor]:
        """Return views of the matrices of the shared experts, by name."""
        return self._channels(0, self.config.num_shared_experts * self.config.intermediate_size)

    def _channels(self, start: int, stop: int) -> dict[str, Tensor]:
        inner = {**self.matrices, **self.biases}
        return {
            name: tensor[start:stop] if name == "down_proj" else tensor[..., start:stop]
            for name, tensor in inner.items()
            if name != "down_bias"
        }

    def _check_config(self) -> None:
        config, width = self.config, self.width
        if width % config.intermediate_size:
            raise ValueError(
                f"intermediate_size ({config.intermediate_size}) must divide the width of the dense block ({width})"
            )
        slices = width // config.intermediate_size
        if config.num_shared_experts >= slices:
            raise ValueError(
                f"num_shared_experts ({config.num_shared_experts}) must be below the number of slices of "
                f"intermediate_size that the dense block has ({slices}), because the routed experts hold the others"
            )
        experts_per_group = config.num_experts // config.num_groups
        for name, value in (
            ("num_experts", config.num_experts),
            ("top_k", config.top_k),
            ("num_experts / num_groups", experts_per_group),
        ):
            if value % self.num_slices:
                raise ValueError(
                    f"{name} ({value}) must be a multiple of the number of slices that the routed experts hold "
                    f"({self.num_slices})"
                )
        if config.apply_weights_to != "output":
            raise ValueError(
                f"from_dense needs apply_weights_to='output', got {config.apply_weights_to!r}: the output of an expert "
                "is not linear in its input"
            )
        if config.latent_size is not None:
            raise ValueError(
                f"from_dense needs latent_size=None, got {config.latent_size}: the experts must read whole tokens, as "
                "the dense block does"
            )
        if config.num_selectable_experts > config.num_experts:
            raise ValueError(
                "from_dense needs a config without zero, copy and constant experts, which do not compute the dense "
                f"block, got {config.num_selectable_experts - config.num_experts}"
            )
        if self.biases and not config.expert_bias:
            raise ValueError(f"the dense block has {', '.join(self.biases)}: expert_bias must be True, got False")
        if config.num_shared_experts and self.biases.keys() - {"down_bias"}:
            raise ValueError(
                f"the dense block has {', '.join(self.biases)}, and shared experts have no biases: num_shared_experts "
                f"must be 0, got {config.num_shared_experts}"
            )


@dataclass(frozen=True)
class Upcycling:
    """Options of `maxmoe.MoE.from_dense`.

    Args:
        scaling: which matrices of the experts are scaled.
        noise: standard deviation of the noise, divided by that of the matrix.
        reinitialized: fraction of the channels of each expert that are drawn anew.
    """

    scaling: Scaling
    noise: float
    reinitialized: float

    def __post_init__(self) -> None:
        if self.scaling not in get_args(Scaling):
            raise ValueError(f"scaling must be one of {get_args(Scaling)}, got {self.scaling!r}")
        check_number("noise", self.noise, at_least=0)
        check_number("reinitialized", self.reinitialized, at_least=0)
        if self.reinitialized > 1:
            raise ValueError(f"reinitialized must be a fraction of at most 1, got {self.reinitialized}")

    def output_scale(self, block: DenseBlock) -> float:
        """Return the factor of the experts' outputs for which the layer computes the output of the dense block.

        A virtual group contributes its weight, the same for all slices, times the output of the block.
        """
        return 1.0 if self.scaling == "none" else block.num_slices / sum_of_weights(block.config)

    def scales(self, block: DenseBlock) -> dict[str, float]:
        """Return the factors of the tensors of an expert, by name."""
        scale, config = self.output_scale(block), block.config
        if self.scaling != "all":
            return {"down_proj": scale}
        # The number of scaled matrices whose product an output is, for an activation that is linear for large inputs.
        num_factors = 3 if config.gated or config.activation == "relu2" else 2
        return dict.fromkeys((*block.matrices, "gate_bias", "up_bias"), scale ** (1 / num_factors))


def sum_of_weights(config: MoEConfig) -> float:
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


@torch.no_grad()
def initialize(layer: Any, block: DenseBlock, options: Upcycling) -> None:
    """Initialize a `maxmoe.MoE` layer with the config of the block: router, routed experts and shared experts."""
    config, scales = block.config, options.scales(block)
    experts = dict(layer.experts.named_parameters(recurse=False))
    for expert in range(config.num_experts):
        # A copy of one expert at a time, because a model may have thousands.
        tensors = {name: tensor * scales.get(name, 1.0) for name, tensor in block.slice(expert).items()}
        _draw_channels(tensors, options.reinitialized)
        for name, tensor in tensors.items():
            if options.noise and name in block.matrices:
                tensor += options.noise * tensor.std(correction=0) * torch.randn_like(tensor)
            experts[name][expert] = tensor
    if "down_bias" in block.biases:
        experts["down_bias"][:] = block.biases["down_bias"] * (options.output_scale(block) / block.num_slices)
    of_groups = layer.router.weight[: config.num_experts : block.num_slices]
    layer.router.weight[: config.num_experts] = of_groups.repeat_interleave(block.num_slices, 0)
    if config.num_shared_experts:
        _initialize_shared(layer.shared_experts, block, options)


def _initialize_shared(shared: Any, block: DenseBlock, options: Upcycling) -> None:
    for name, tensor in block.shared().items():
        shared.get_parameter(name).copy_(tensor)
    if shared.output_gate is not None:
        shared.output_gate.zero_()  # the gate is sigmoid(0) = 1 / 2 for every token
        if options.scaling != "none":
            shared.down_proj.mul_(2.0)


def _draw_channels(tensors: Mapping[str, Tensor], fraction: float) -> None:
    """Draw random channels of an expert anew, from normal distributions with the mean and deviation of these channels.

    Source: drop-upcycling, arXiv:2502.19261 section 3.
    """
    size = tensors["up_proj"].shape[1]
    channels = torch.randperm(size, device=tensors["up_proj"].device)[: round(fraction * size)]
    if not len(channels):
        return
    for name in tensors.keys() & _BIASES.keys():
        dim = 0 if name == "down_proj" else 1
        chosen = tensors[name].index_select(dim, channels)
        drawn = torch.randn_like(chosen) * chosen.std(correction=0) + chosen.mean()
        tensors[name].index_copy_(dim, channels, drawn)


def _weight(name: str, projection: Projection | None) -> Tensor:
    weight = projection.weight if isinstance(projection, nn.Linear) else projection
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name} must be a torch.nn.Linear or its weight, got {type(projection).__name__}")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"{name} must be a floating matrix (out, in), got {weight.dtype} of shape {_shape(weight)}")
    return weight


def _check_weights(config: MoEConfig, weights: Mapping[str, Tensor]) -> None:
    """Raise unless the weights (out, in) have shapes that fit each other and the config, and one dtype and device."""
    up, size = weights["up_proj"], config.hidden_size
    for name, weight in {"up_proj": up, **weights}.items():  # first what gives the width
        expected = (size, up.shape[0]) if name == "down_proj" else (up.shape[0], size)
        if tuple(weight.shape) != expected:
            raise ValueError(
                f"{name} must have shape {expected}, which is (out, in) as in torch.nn.Linear, with hidden_size "
                f"({size}) and the width of up_proj ({up.shape[0]}), got {_shape(weight)}"
            )
        if (weight.dtype, weight.device) != (up.dtype, up.device):
            raise ValueError(
                f"{name} must be {up.dtype} on {up.device} as up_proj is, got {weight.dtype} on {weight.device}"
            )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
