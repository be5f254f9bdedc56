"""Module of the routed experts, and their weights as one value."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maxmoe.adapters import factors_of
from maxmoe.config import MoEConfig
from maxmoe.config.components import Activation
from maxmoe.declaration import Declaration
from maxmoe.nn.rms_norm import LatentNorm
from maxmoe.ops import ActivationFunction, Projection, RaggedPlan, expert_ffn, ragged_sort, ragged_unsort
from maxmoe.ops._projection import operands
from maxmoe.ops.expert_ffn import activate_with
from maxmoe.quantization import QuantizedStack
from maxmoe.reference import activate


class ExpertWeights(NamedTuple):
    """Weights of L experts, in the order of the arguments of `maxmoe.ops.expert_ffn`.

    Attributes:
        gate: ``(L, D, F)``, or None.
        up: ``(L, D, F)``; with a fused gate ``(L, D, 2F)``.
        down: ``(L, F, D)``.
    """

    gate: Projection | None
    up: Projection
    down: Projection

    def tensors(self) -> list[Tensor]:
        """Return all tensors, whose first dim is L; of quantized weights, their codes, scales and zero points."""
        found: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self._map(collect)
        return found

    def with_tensors(self, tensors: Iterable[Tensor]) -> "ExpertWeights":
        """Return weights with other tensors, in the order of `tensors`; they may be of another number of experts."""
        remaining = iter(tensors)
        return self._map(lambda _: next(remaining))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "ExpertWeights":
        gate = None if self.gate is None else self.gate.map(function)
        return ExpertWeights(gate, self.up.map(function), self.down.map(function))


class ForeignExperts(Protocol):
    """Interface of experts of other processes, some of whose rows this process computes."""

    def compute(
        self, experts: Callable[[ExpertWeights, RaggedPlan], Tensor], own: ExpertWeights, plan: RaggedPlan
    ) -> Tensor:
        """Receive the weights of the foreign experts, and compute them after the experts of this process.

        Args:
            experts: function that computes the rows of a plan with the weights of its experts: ``(N, D)``, zero in
                other rows.
            own: weights of the experts of this process, which it sends to others.
            plan: rows that the experts of this process compute.

        Returns:
            ``(N, D)``, sum of the outputs of own and foreign experts.
        """
        ...


class Experts(nn.Module):
    """Routed experts: stacks of matrices, `gate_proj` and `up_proj` [E, D, F], `down_proj` [E, F, D].

    D is `MoEConfig.row_size`.

    `maxmoe.quantize_experts` quantizes them; ``implementation="dense"`` computes with ordinary tensors alone.

    Args:
        activation: function that replaces the activation of the config; see `maxmoe.ops.expert_ffn`.
        **options: device and dtype of the parameters.

    Attributes:
        is_plain: whether `maxmoe.ops.expert_ffn` with a named activation is all that the experts compute.
    """

    gate_proj: Tensor | None
    up_proj: Tensor
    down_proj: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    recompute_names = ("experts",)
    recompute: frozenset[str] = frozenset()  # see `maxmoe.set_recompute`

    is_transposed = True  # read by PEFT: each matrix is [in, out], unlike the weight of nn.Linear

    def __init__(self, config: MoEConfig, *, activation: ActivationFunction | None = None, **options: Any) -> None:
        super().__init__()
        self.config = config
        self.activation_arguments = activation_arguments(config.activation_arguments, activation)
        self.activation: Activation | ActivationFunction = self.activation_arguments["activation"]
        num_experts, row_size, width = config.num_experts, config.row_size, config.intermediate_size

        def parameter(exists: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **options)) if exists else None

        gated, biased = config.gated, config.expert_bias
        self.register_parameter("gate_proj", parameter(gated, num_experts, row_size, width))
        self.register_parameter("up_proj", parameter(True, num_experts, row_size, width))
        self.register_parameter("down_proj", parameter(True, num_experts, width, row_size))
        self.register_parameter("gate_bias", parameter(gated and biased, num_experts, width))
        self.register_parameter("up_bias", parameter(biased, num_experts, width))
        self.register_parameter("down_bias", parameter(biased, num_experts, row_size))
        norms = config.norms
        self.norm = LatentNorm(row_size, norms.output_eps, scales_input=True, **options) if norms.output else None
        # The operator has no argument for a function, and none for a norm.
        self.is_plain = type(self) is Experts and not callable(self.activation) and self.norm is None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize projections so that they preserve the variance of their input, and biases to zero.

        Raises:
            ValueError: for quantized projections, whose values come from weights or a checkpoint.
        """
        if isinstance(self.up_proj, QuantizedStack):
            raise ValueError(
                f"experts quantized as {self.up_proj.format} are not initialized: load a checkpoint, or initialize the "
                "experts and quantize them afterwards"
            )
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(
        self, x: Tensor, weights: Tensor | None, plan: RaggedPlan, foreign: ForeignExperts | None = None
    ) -> Tensor:
        """Compute the experts and the weighted sum of their outputs.

        Args:
            x: ``(T, D)``, floating, tokens.
            weights: ``(T, K)``, floating, routing weights; None for ones.
            plan: plan from `maxmoe.ops.ragged_plan`. With ``implementation="dense"``, rows must be sorted by expert,
                with the same number for each expert, and `weights` must be None.
            foreign: experts of other processes with further rows of x; None for none. Not with
                ``implementation="dense"``.

        Returns:
            ``(T, D)``, dtype of x, the weighted sum over the experts of each token.
        """
        if self.config.implementation == "dense":
            num_experts = self.up_proj.shape[0]  # of this rank, if experts are sharded
            return self._batched(x.view(num_experts, x.shape[0] // num_experts, x.shape[1])).flatten(0, 1)

        def compute(experts: ExpertWeights, plan: RaggedPlan) -> Tensor:
            arguments, norm = (x, weights, plan), self.norm
            if norm is not None:  # before the sum over the experts of a token, so that each row is computed by itself
                arguments = (ragged_sort(x, plan), None, plan.of_rows())
            outputs = expert_ffn(
                *arguments,
                *experts,
                **self.activation_arguments,
                recompute="experts" in self.recompute,
            )
            return outputs if norm is None else ragged_unsort(norm(outputs), plan, weights)

        own = self._weights()
        if callable(self.activation):  # a recomputation reads them after the forward, see `_batched`
            own = own.with_tensors(own.tensors())
        return compute(own, plan) if foreign is None else foreign.compute(compute, own, plan)

    def _weights(self) -> ExpertWeights:
        """Return the weights of this call, with the factors of adapters."""
        gate = None
        if self.gate_proj is not None:
            gate = Projection(self.gate_proj, self.gate_bias, factors_of(self, "gate_proj"))
        return ExpertWeights(
            gate,
            Projection(self.up_proj, self.up_bias, factors_of(self, "up_proj")),
            Projection(self.down_proj, self.down_bias, factors_of(self, "down_proj")),
        )

    def expert_matrices(self) -> dict[str, bool]:
        """Return True for each stack ``(E, in, out)`` that may be quantized and adapted, by name."""
        return dict.fromkeys(("gate_proj", "up_proj", "down_proj")[not self.config.gated :], True)

    def _batched(self, inputs: Tensor) -> Tensor:
        """Compute blocks of rows ``(E, N, D)``, one per expert, with batched matrix products."""

        def project(x: Tensor, projection: Projection) -> Tensor:
            matrices, bias, factors = projection
            if isinstance(matrices, QuantizedStack):
                raise ValueError(
                    f"implementation='dense' computes with ordinary tensors, got experts quantized as "
                    f"{matrices.format}: set implementation='sparse'"
                )
            product = x @ matrices
            if factors is not None:
                a, b = operands(factors, matrices.dtype, "factors")
                product = torch.baddbmm(product, x @ a, b)
            return product if bias is None else product + bias.unsqueeze(1).to(product.dtype)

        # On a mesh, the gathered parameters are attributes of the module during its forward only, so that a
        # recomputation must use the tensors read here.
        weights = self._weights()

        def compute(inputs: Tensor) -> Tensor:
            gate = None if weights.gate is None else project(inputs, weights.gate)
            up = project(inputs, weights.up)
            if callable(self.activation):
                activated = activate_with(self.activation, gate, up)
            else:
                activated = activate(gate, up, **self.activation_arguments)
            outputs = project(activated, weights.down)
            return outputs if self.norm is None else self.norm(outputs)

        if "experts" not in self.recompute or not torch.is_grad_enabled():
            return compute(inputs)
        outputs: Tensor = checkpoint(compute, inputs, use_reentrant=False)  # recomputation stops before down_proj
        return outputs

    @property
    def declaration(self) -> Declaration:
        """Declare logical names, matrix layouts and tensor-parallel dims."""
        # A FSDP unit, because dispatch decides over which axes the experts are gathered.
        return Declaration(
            logical_names={
                "gate_proj": ("exp", "embed_moe", "mlp_moe"),
                "up_proj": ("exp", "embed_moe", "mlp_moe"),
                "down_proj": ("exp", "mlp_moe", "embed_moe"),
                "gate_bias": ("exp", "mlp_moe"),
                "up_bias": ("exp", "mlp_moe"),
                "down_bias": ("exp", "embed_moe"),
            },
            input_dims={"gate_proj": "embed_moe", "up_proj": "embed_moe", "down_proj": "mlp_moe"},
            fsdp_unit=True,
            # The norm needs the whole output of an expert.
            tensor_parallel_dims={} if self.norm is not None else {"mlp_moe": self.config.intermediate_size},
            added_to_output=("down_bias",),
        )


def activation_arguments(of_config: dict[str, Any], activation: ActivationFunction | None) -> dict[str, Any]:
    """Return the arguments of `expert_ffn` for the activation of the config, or for a function in its place."""
    return of_config if activation is None else {"activation": activation}
