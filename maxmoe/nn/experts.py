"""Module of the routed experts."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

from maxmoe.adapters import connect_if_imported, factors_of, takes_factors
from maxmoe.config import MoEConfig
from maxmoe.declaration import Declaration, SavedTensor
from maxmoe.nn.dense_activation import activate
from maxmoe.ops import LowRankFactors, RaggedPlan, expert_ffn
from maxmoe.ops._low_rank import operands


class Experts(nn.Module):
    """Routed experts: stacks of matrices, `gate_proj` and `up_proj` [E, D, F], `down_proj` [E, F, D].

    Args:
        config: config of the layer.
        device: device of the parameters.
        dtype: dtype of the parameters.
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

    def __init__(
        self, config: MoEConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        connect_if_imported()
        self.config = config
        num_experts, hidden_size, width = config.num_experts, config.hidden_size, config.intermediate_size

        def parameter(exists: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if exists else None

        gated, biased = config.gated, config.expert_bias
        self.register_parameter("gate_proj", parameter(gated, num_experts, hidden_size, width))
        self.register_parameter("up_proj", parameter(True, num_experts, hidden_size, width))
        self.register_parameter("down_proj", parameter(True, num_experts, width, hidden_size))
        self.register_parameter("gate_bias", parameter(gated and biased, num_experts, width))
        self.register_parameter("up_bias", parameter(biased, num_experts, width))
        self.register_parameter("down_bias", parameter(biased, num_experts, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize projections so that they preserve the variance of their input, and biases to zero."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, x: Tensor, weights: Tensor | None, plan: RaggedPlan) -> Tensor:
        """Compute the experts and the weighted sum of their outputs.

        Args:
            x: ``(T, D)``, floating, tokens.
            weights: ``(T, K)``, floating, routing weights; None for ones.
            plan: plan from `maxmoe.ops.ragged_plan`. With ``implementation="dense"``, rows must be sorted by expert,
                with the same number for each expert, and `weights` must be None.

        Returns:
            ``(T, D)``, dtype of x, the weighted sum over the experts of each token.
        """
        if is_parametrized(self):
            connect_if_imported()  # PEFT has been imported after this library: from the next call on
        if self.config.implementation == "dense":
            num_experts = self.up_proj.shape[0]  # of this rank, if experts are sharded
            return self._batched(x.view(num_experts, x.shape[0] // num_experts, x.shape[1])).flatten(0, 1)
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
            gate_factors=factors_of(self, "gate_proj"),
            up_factors=factors_of(self, "up_proj"),
            down_factors=factors_of(self, "down_proj"),
            activation=self.config.activation,
            limit=self.config.activation_limit,
            recompute="experts" in self.recompute,
        )

    def _batched(self, inputs: Tensor) -> Tensor:
        """Compute blocks of rows ``(E, N, D)``, one per expert, with batched matrix products."""

        def project(x: Tensor, matrices: Tensor, bias: Tensor | None, factors: LowRankFactors | None) -> Tensor:
            product = x @ matrices
            if factors is not None:
                a, b = operands(factors, matrices.dtype, "factors")
                product = torch.baddbmm(product, x @ a, b)
            return product if bias is None else product + bias.unsqueeze(1).to(product.dtype)

        # On a mesh, the gathered parameters are attributes of the module during its forward only, so that a
        # recomputation must use the tensors read here.
        gate_proj, up_proj, down_proj = self.gate_proj, self.up_proj, self.down_proj
        gate_bias, up_bias, down_bias = self.gate_bias, self.up_bias, self.down_bias
        gate_factors, up_factors, down_factors = (factors_of(self, f"{name}_proj") for name in ("gate", "up", "down"))

        def compute(inputs: Tensor) -> Tensor:
            gate = None if gate_proj is None else project(inputs, gate_proj, gate_bias, gate_factors)
            up = project(inputs, up_proj, up_bias, up_factors)
            activated = activate(gate, up, self.config.activation, self.config.activation_limit)
            return project(activated, down_proj, down_bias, down_factors)

        if "experts" not in self.recompute or not torch.is_grad_enabled():
            return compute(inputs)
        outputs: Tensor = checkpoint(compute, inputs, use_reentrant=False)  # recomputation stops before down_proj
        return outputs

    @property
    def declaration(self) -> Declaration:
        """Declare logical names, matrix layouts, tensor-parallel dims and saved tensors."""
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
            tensor_parallel_dims={"mlp_moe": self.config.intermediate_size},
            added_to_output=("down_bias",),
            saved_tensors=self._saved_tensors,
        )

    def _saved_tensors(self, batch: int, length: int) -> dict[str, SavedTensor]:
        """Describe the tensors saved for the K rows of each token; the dispatcher saves the input and the plan."""
        if self.config.implementation != "sparse":
            raise ValueError(f"the tensors that implementation={self.config.implementation!r} saves are not known")
        K, D, F = self.config.top_k, self.config.hidden_size, self.config.intermediate_size
        rows = ("activation_batch_moe", "activation_length_moe", "activation_exp")
        width = 2 * F if self.config.gated else F
        saved = {
            "preactivations": SavedTensor(
                (batch, length, K, width), (*rows, "activation_mlp_moe"), is_kept="experts" not in self.recompute
            ),
            "slots": SavedTensor((batch, length, K), rows, torch.int64),
        }
        if self.config.apply_weights_to == "input":
            is_kept = "dispatch" not in self.recompute
            saved["weighted_input"] = SavedTensor(
                (batch, length, K, D), (*rows, "activation_embed_moe"), is_kept=is_kept
            )
            saved["order"] = SavedTensor((batch, length, K), rows, torch.int64)
        return saved

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


takes_factors(lambda module, name: isinstance(module, Experts) and name in ("gate_proj", "up_proj", "down_proj"))
