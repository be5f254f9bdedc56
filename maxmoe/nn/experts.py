"""The parameters of the experts, routed and shared."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from maxmoe.config import MoEConfig
from maxmoe.nn.linear import linear
from maxmoe.nn.parallel import TOKENS, Activation, LogicalNames
from maxmoe.ops import RaggedPlan, expert_ffn


class Experts(nn.Module):
    """The routed experts: stacks of matrices, `gate_proj` and `up_proj` [E, D, F], `down_proj` [E, F, D].

    Args:
        config: of the layer.
        device: of the parameters.
        dtype: of the parameters.
    """

    logical_names: ClassVar[LogicalNames] = {
        "gate_proj": ("exp", "embed_moe", "mlp_moe"),
        "up_proj": ("exp", "embed_moe", "mlp_moe"),
        "down_proj": ("exp", "mlp_moe", "embed_moe"),
        "gate_bias": ("exp", "mlp_moe"),
        "up_bias": ("exp", "mlp_moe"),
        "down_bias": ("exp", "embed_moe"),
    }

    gate_proj: Tensor | None
    up_proj: Tensor
    down_proj: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(
        self, config: MoEConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        num_experts, hidden_size, width = config.num_experts, config.hidden_size, config.intermediate_size

        def parameter(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None

        gated, biased = config.gated, config.expert_bias
        self.register_parameter("gate_proj", parameter(gated, num_experts, hidden_size, width))
        self.register_parameter("up_proj", parameter(True, num_experts, hidden_size, width))
        self.register_parameter("down_proj", parameter(True, num_experts, width, hidden_size))
        self.register_parameter("gate_bias", parameter(gated and biased, num_experts, width))
        self.register_parameter("up_bias", parameter(biased, num_experts, width))
        self.register_parameter("down_bias", parameter(biased, num_experts, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each projection keeps the variance of its input; biases zero."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, x: Tensor, weights: Tensor | None, plan: RaggedPlan) -> Tensor:
        """Compute the rows of a plan with `maxmoe.ops.expert_ffn`.

        Args:
            x: ``(T, D)``, floating.
            weights: ``(T, K)``, floating, or None for ones.
            plan: from `maxmoe.ops.ragged_plan`.

        Returns:
            ``(T, D)``, dtype of x.
        """
        return expert_ffn(
            x,
            weights,
            plan,
            self.gate_proj,
            self.up_proj,
            self.down_proj,
            gate_bias=self.gate_bias,
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            activation=self.config.activation,
            limit=self.config.activation_limit,
        )

    def kept_for_backward(self, batch: int, length: int) -> dict[str, Activation]:
        """See `Activation`; the input is in `MoE`. Each token's K rows lie with the experts that they went to."""
        if self.config.implementation != "sparse":
            raise ValueError(f"what implementation={self.config.implementation!r} keeps for backward is not known")
        K, D, F = self.config.top_k, self.config.hidden_size, self.config.intermediate_size
        rows = ("activation_batch_moe", "activation_length_moe", "activation_exp")
        width = 2 * F if self.config.gated else F
        kept = {
            "preactivations": Activation((batch, length, K, width), (*rows, "activation_mlp_moe")),
            "plan": Activation((batch, length, K, 2), (*rows, None), torch.int64),
        }
        if self.config.apply_weights_to == "input":
            kept["weighted_input"] = Activation((batch, length, K, D), (*rows, "activation_embed_moe"))
            kept["order"] = Activation((batch, length, K), rows, torch.int64)
        return kept

    def extra_repr(self) -> str:
        """Sizes, for `print`.

        Returns:
            One line.
        """
        config = self.config
        return (
            f"num_experts={config.num_experts}, hidden_size={config.hidden_size}, "
            f"intermediate_size={config.intermediate_size}, activation={config.activation!r}, "
            f"gated={config.gated}, bias={config.expert_bias}"
        )


class SharedExperts(nn.Module):
    """One dense expert of width n * F for every token: `gate_proj` and `up_proj` [D, nF], `down_proj` [nF, D].

    With `shared_expert_gate` its output is scaled by sigmoid(x . output_gate).

    Args:
        config: of the layer.
        device: of the parameters.
        dtype: of the parameters.
    """

    logical_names: ClassVar[LogicalNames] = {
        "gate_proj": ("embed", "mlp"),
        "up_proj": ("embed", "mlp"),
        "down_proj": ("mlp", "embed"),
        "output_gate": ("embed",),
    }

    gate_proj: Tensor | None
    up_proj: Tensor
    down_proj: Tensor
    output_gate: Tensor | None

    def __init__(
        self, config: MoEConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        hidden_size, width = config.hidden_size, config.num_shared_experts * config.intermediate_size
        self.parallel_dims = {"mlp": width}

        def parameter(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None

        self.register_parameter("gate_proj", parameter(config.gated, hidden_size, width))
        self.register_parameter("up_proj", parameter(True, hidden_size, width))
        self.register_parameter("down_proj", parameter(True, width, hidden_size))
        self.register_parameter("output_gate", parameter(config.shared_expert_gate, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each projection keeps the variance of its input."""
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=parameter.shape[0] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the dense expert: `maxmoe.ops.expert_ffn` with all tokens in one group.

        Args:
            x: ``(T, D)``, floating.

        Returns:
            ``(T, D)``, dtype of x.
        """
        return expert_ffn(
            x,
            None if self.output_gate is None else torch.sigmoid(linear(x, self.output_gate.unsqueeze(1))),
            one_group(x),
            None if self.gate_proj is None else self.gate_proj.unsqueeze(0),
            self.up_proj.unsqueeze(0),
            self.down_proj.unsqueeze(0),
            activation=self.config.activation,
            limit=self.config.activation_limit,
        )

    def kept_for_backward(self, batch: int, length: int) -> dict[str, Activation]:
        """See `Activation`; the input is in `MoE`."""
        F = self.config.num_shared_experts * self.config.intermediate_size
        width = 2 * F if self.config.gated else F
        kept = {
            "preactivations": Activation((batch, length, width), (*TOKENS, "activation_mlp")),
            "order": Activation((batch, length), TOKENS, torch.int64),
        }
        if self.output_gate is not None:
            kept["weights"] = Activation((batch, length), TOKENS)
        return kept

    def extra_repr(self) -> str:
        """Sizes, for `print`.

        Returns:
            One line.
        """
        config = self.config
        width = config.num_shared_experts * config.intermediate_size
        return (
            f"hidden_size={config.hidden_size}, intermediate_size={width}, "
            f"activation={config.activation!r}, gate={config.shared_expert_gate}"
        )


def one_group(x: Tensor) -> RaggedPlan:
    """Plan of rows that lie in order already, all of one expert.

    Args:
        x: ``(R, D)``.

    Returns:
        The plan, with K = 1.
    """
    order = torch.arange(x.shape[0], device=x.device)
    group_sizes = torch.full((1,), x.shape[0], device=x.device)
    return RaggedPlan(order, order, group_sizes, torch.zeros_like(group_sizes[0]), 1)
