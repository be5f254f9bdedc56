"""Module of the shared experts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from maxmoe.config import Activation, MoEConfig
from maxmoe.declaration import TOKEN_DIMS, Declaration, SavedTensor
from maxmoe.nn.experts import check_activation_is_known
from maxmoe.ops import ActivationFunction, RaggedPlan, expert_ffn, linear, ragged_plan


class SharedExperts(nn.Module):
    """Dense expert of width n * F for all tokens: `gate_proj` and `up_proj` [D, nF], `down_proj` [nF, D].

    With `shared_expert_gate`, its output is scaled by sigmoid(x . output_gate).

    Args:
        config: config of the layer.
        activation: function that replaces the activation of the config; see `maxmoe.ops.expert_ffn`.
        **options: device and dtype of the parameters.
    """

    gate_proj: Tensor | None
    up_proj: Tensor
    down_proj: Tensor
    output_gate: Tensor | None

    recompute_names = ("shared_experts",)
    recompute: frozenset[str] = frozenset()  # see `maxmoe.set_recompute`

    def __init__(self, config: MoEConfig, *, activation: ActivationFunction | None = None, **options: Any) -> None:
        super().__init__()
        self.config = config
        self.activation: Activation | ActivationFunction = config.activation if activation is None else activation
        hidden_size, width = config.hidden_size, config.num_shared_experts * config.intermediate_size

        def parameter(exists: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **options)) if exists else None

        self.register_parameter("gate_proj", parameter(config.gated, hidden_size, width))
        self.register_parameter("up_proj", parameter(True, hidden_size, width))
        self.register_parameter("down_proj", parameter(True, width, hidden_size))
        self.register_parameter("output_gate", parameter(config.shared_expert_gate, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize projections so that they preserve the variance of their input."""
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=parameter.shape[0] ** -0.5)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Compute the dense expert with `maxmoe.ops.expert_ffn`, all tokens in one group.

        Args:
            x: ``(T, D)``, floating, tokens.
            token_mask: ``(T,)``, bool, False for padding, which is not computed.

        Returns:
            ``(T, D)``, dtype of x, outputs; zero for padding.
        """
        return expert_ffn(
            x,
            None if self.output_gate is None else _sigmoid(linear(x, self.output_gate.unsqueeze(0), out_dtype=x.dtype)),
            _one_group(x, token_mask),
            None if self.gate_proj is None else self.gate_proj.unsqueeze(0),
            self.up_proj.unsqueeze(0),
            self.down_proj.unsqueeze(0),
            activation=self.activation,
            limit=self.config.activation_limit,
            recompute="shared_experts" in self.recompute,
        )

    @property
    def declaration(self) -> Declaration:
        """Declare logical names, matrix layouts, tensor-parallel dims and saved tensors."""
        return Declaration(
            logical_names={
                "gate_proj": ("embed", "mlp"),
                "up_proj": ("embed", "mlp"),
                "down_proj": ("mlp", "embed"),
                "output_gate": ("embed",),
            },
            input_dims={"gate_proj": "embed", "up_proj": "embed", "down_proj": "mlp"},
            tensor_parallel_dims={"mlp": self.config.num_shared_experts * self.config.intermediate_size},
            saved_tensors=self._saved_tensors,
        )

    def _saved_tensors(self, batch: int, length: int) -> dict[str, SavedTensor]:
        """Describe the saved tensors; `MoE` declares the input."""
        check_activation_is_known(self.activation)
        F = self.config.num_shared_experts * self.config.intermediate_size
        width = 2 * F if self.config.gated else F
        saved = {
            "preactivations": SavedTensor(
                (batch, length, width), (*TOKEN_DIMS, "activation_mlp"), is_kept="shared_experts" not in self.recompute
            ),
            "order": SavedTensor((batch, length), TOKEN_DIMS, torch.int64),
            "group_sizes": SavedTensor((1,), (None,), torch.int64),
        }
        if self.output_gate is not None:
            saved["softmax"] = SavedTensor((batch, length, 2), (*TOKEN_DIMS, None))
        return saved


def _sigmoid(column: Tensor) -> Tensor:
    """Compute the sigmoid of a column ``(T, 1)`` such that the bits of an element do not depend on its position."""
    # torch.sigmoid computes the last elements of each thread's chunk with a scalar function. The softmax of (x, 0) is
    # the sigmoid of x, and uses one function for all rows. torch.cat would refuse bfloat16 under autocast to float16.
    return pad(column, (0, 1)).softmax(1)[:, :1]


def _one_group(x: Tensor, token_mask: Tensor | None) -> RaggedPlan:
    """Return the plan in which one expert computes all tokens except padding."""
    if token_mask is None:
        return RaggedPlan.of_sorted_rows(x.shape[0], torch.full((1,), x.shape[0], device=x.device))
    experts = token_mask.long().sub(1).unsqueeze(1)  # expert 0, or -1 for padding
    return ragged_plan(experts, 1, max_rows=x.shape[0])
