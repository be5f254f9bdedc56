"""Parts of a layer beside its router and its routed experts."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from maxmoe.config import MoEConfig
from maxmoe.config.components import Activation, ZeroComputation
from maxmoe.declaration import Declaration
from maxmoe.nn.experts import activation_arguments
from maxmoe.nn.rms_norm import LatentNorm
from maxmoe.nn.routing import TopK
from maxmoe.ops import ActivationFunction, RaggedPlan, expert_ffn, gmm, linear, ragged_plan


class SharedExperts(nn.Module):
    """Dense expert of width n * F for all tokens: `gate_proj` and `up_proj` [D, nF], `down_proj` [nF, D].

    With `shared_expert_gate`, its output is scaled by sigmoid(x . output_gate).

    With a router that scores shared experts, n experts of width F, `gate_proj` and `up_proj` [n, D, F], `down_proj`
    [n, F, D], whose outputs the router weighs. On a mesh, they are not split along F, because each rank would have a
    partial gradient of the weights.

    out[t] = sum_j weights[t, j] * expert_j(x[t])

    Args:
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
        self.activation_arguments = activation_arguments(config.shared_activation_arguments, activation)
        self.activation: Activation | ActivationFunction = self.activation_arguments["activation"]
        self._are_scored = config.router_rule.scores_shared_experts
        hidden_size, width = config.hidden_size, config.intermediate_size
        stack: tuple[int, ...] = (config.num_shared_experts,)
        if not self._are_scored:
            stack, width = (), config.num_shared_experts * width

        def parameter(exists: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **options)) if exists else None

        self.register_parameter("gate_proj", parameter(config.gated, *stack, hidden_size, width))
        self.register_parameter("up_proj", parameter(True, *stack, hidden_size, width))
        self.register_parameter("down_proj", parameter(True, *stack, width, hidden_size))
        self.register_parameter("output_gate", parameter(config.shared_expert_gate, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize projections so that they preserve the variance of their input."""
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=parameter.shape[max(parameter.dim() - 2, 0)] ** -0.5)

    def forward(self, x: Tensor, token_mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Compute the outputs ``(T, D)`` of tokens x ``(T, D)``, zero where `token_mask` ``(T,)`` is False.

        `weights` ``(T, n)`` multiply the outputs of experts that the router scores; None for ones.
        """
        count, gate, up, down = self.config.num_shared_experts, self.gate_proj, self.up_proj, self.down_proj
        if not self._are_scored:
            count, up, down = 1, up.unsqueeze(0), down.unsqueeze(0)
            gate = None if gate is None else gate.unsqueeze(0)
        if self.output_gate is not None:
            weights = _sigmoid(linear(x, self.output_gate.unsqueeze(0), out_dtype=x.dtype))
        return expert_ffn(
            x,
            weights,
            _plan_of_all_tokens(x, token_mask, count),
            gate,
            up,
            down,
            **self.activation_arguments,
            recompute="shared_experts" in self.recompute,
        )

    @property
    def declaration(self) -> Declaration:
        """Declare logical names, matrix layouts and tensor-parallel dims."""
        config = self.config
        stack: tuple[str | None, ...] = (None,) if self._are_scored else ()
        return Declaration(
            logical_names={
                "gate_proj": (*stack, "embed", "mlp"),
                "up_proj": (*stack, "embed", "mlp"),
                "down_proj": (*stack, "mlp", "embed"),
                "output_gate": ("embed",),
            },
            input_dims={"gate_proj": "embed", "up_proj": "embed", "down_proj": "mlp"},
            tensor_parallel_dims={} if stack else {"mlp": config.num_shared_experts * config.intermediate_size},
        )


def _sigmoid(column: Tensor) -> Tensor:
    """Compute the sigmoid of a column ``(T, 1)`` such that the bits of an element do not depend on its position."""
    # torch.sigmoid computes the last elements of each thread's chunk with a scalar function. The softmax of (x, 0) is
    # the sigmoid of x, and uses one function for all rows. torch.cat would refuse bfloat16 under autocast to float16.
    return pad(column, (0, 1)).softmax(1)[:, :1]


def _plan_of_all_tokens(x: Tensor, token_mask: Tensor | None, count: int) -> RaggedPlan:
    """Return the plan in which each of `count` experts computes all tokens except padding."""
    if token_mask is None and count == 1:
        return RaggedPlan.of_sorted_rows(x.shape[0], torch.full((1,), x.shape[0], device=x.device))
    experts = torch.arange(count, device=x.device)
    if token_mask is None:
        experts = experts.expand(x.shape[0], count)
        return ragged_plan(experts, count, num_rows=experts.numel())
    experts = experts.where(token_mask.unsqueeze(1), -1)
    return ragged_plan(experts, count, max_rows=experts.numel())


class ZeroComputationExperts(nn.Module):
    """Zero, copy and constant experts, which the router selects beside the experts of `Experts`.

    zero(x) = 0
    copy(x) = x
    constant_j(x) = a * x + b * vectors[j],   (a, b) = softmax(mixing[j] @ x)

    Their slots are neither sorted nor sent to other ranks. On a mesh, each rank computes them for its own tokens.

    Args:
        **options: device and dtype of the parameters.

    Source: MoE++ (arXiv:2410.07348) section 3.1; LongCat-Flash (arXiv:2509.01322) section 2.1, for copies.
    """

    vectors: Tensor | None
    mixing: Tensor | None

    def __init__(self, config: MoEConfig, **options: Any) -> None:
        super().__init__()
        self.config = config
        self.kinds, hidden_size = config.zero_computation or ZeroComputation(), config.hidden_size
        count = self.kinds.constant

        def parameter(*shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **options)) if count else None

        self.register_parameter("vectors", parameter(count, hidden_size))
        self.register_parameter("mixing", parameter(count, 2, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the vectors with variance one and the mixing such that its logits have variance one."""
        if self.vectors is not None:
            nn.init.normal_(self.vectors)
        if self.mixing is not None:
            nn.init.normal_(self.mixing, std=self.config.hidden_size**-0.5)

    def forward(self, x: Tensor, top_k: TopK, dtype: torch.dtype | None = None) -> Tensor:
        """Compute the weighted sum ``(T, D)`` of the copy and constant experts of each token of x ``(T, D)``.

        Ids of other experts are skipped. The result has the given dtype, or the dtype of x.
        """
        first_copy = self.config.num_experts + self.kinds.zero
        first_constant = first_copy + self.kinds.copy
        is_copy = (top_k.experts >= first_copy) & (top_k.experts < first_constant)
        # One factor of x per token; the product promotes a narrow x without saving a wide copy.
        factors = top_k.weights.masked_fill(~is_copy, 0.0).sum(1, keepdim=True)
        if self.vectors is None or self.mixing is None:
            return (x * factors).to(dtype or x.dtype)
        num_tokens, count = x.shape[0], self.kinds.constant
        # A token selects an expert once at most, so that each element is written once, other than by zeros.
        index = (top_k.experts - first_constant).clamp_min(0)
        of_constants = top_k.weights.masked_fill(top_k.experts < first_constant, 0.0)
        weights = of_constants.new_zeros(num_tokens, count).scatter_add(1, index, of_constants)
        shares = linear(x, self.mixing.flatten(0, 1)).view(num_tokens, count, 2).softmax(2)
        of_x, of_vectors = (shares * weights.unsqueeze(2)).unbind(2)
        return (x * (factors + of_x.sum(1, keepdim=True)) + linear(of_vectors, self.vectors.t())).to(dtype or x.dtype)

    @property
    def declaration(self) -> Declaration:
        """Declare logical names."""
        return Declaration(
            logical_names={"vectors": (None, "embed"), "mixing": (None, None, "embed")},
        )


class LatentProjection(nn.Module):
    """Linear map between tokens and the rows of latent experts: x @ weight. All routed experts share it.

    With `ExpertNorms.latent_in`, the projection "in" returns norm(x @ weight), with `ExpertNorms.latent_out` the
    projection "out" norm(x) @ weight.

    The projection "in", before the experts, has a `weight` [D, L], the projection "out", after their weighted sum,
    [L, D]. What is sent to experts on other ranks has L elements per row.

    Args:
        config: config of the layer; L is its latent_size.
        direction: "in" or "out".
        **options: device and dtype of the parameter.

    Source: NVIDIA Nemotron 3 (LatentMoE); Megatron-LM, `fc1_latent_proj` and `fc2_latent_proj`.
    """

    weight: Tensor

    def __init__(self, config: MoEConfig, direction: Literal["in", "out"], **options: Any) -> None:
        super().__init__()
        self.direction = direction
        sizes, self._names = (config.hidden_size, config.row_size), ("embed", "latent")
        if direction == "out":
            sizes, self._names = sizes[::-1], self._names[::-1]
        self.weight = nn.Parameter(torch.empty(sizes, **options))
        norms = config.norms
        has_norm = norms.latent_in if direction == "in" else norms.latent_out
        self.norm = LatentNorm(config.row_size, norms.eps, **options) if has_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight so that the projection preserves the variance of its input."""
        nn.init.normal_(self.weight, std=self.weight.shape[0] ** -0.5)
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Project rows ``(T, D)``, for "out" ``(T, L)``, each bitwise independent of the others."""
        norm, is_in = self.norm, self.direction == "in"
        rows = x if norm is None or is_in else norm(x)
        rows = gmm(rows, self.weight.unsqueeze(0), torch.full((1,), x.shape[0], device=x.device))
        return norm(rows) if norm is not None and is_in else rows

    @property
    def declaration(self) -> Declaration:
        """Declare logical names and the input dim."""
        return Declaration(
            logical_names={"weight": self._names},
            input_dims={"weight": self._names[0]},
        )
