"""Mixture-of-Experts layer."""

import dataclasses
import math

import torch
from torch import Tensor, nn
from typing_extensions import Self

from maxmoe._torch import reshaped
from maxmoe.adapters import without_adapters
from maxmoe.config import MoEConfig
from maxmoe.conversion import check_block, config_of_block, give_weights, take_weights
from maxmoe.declaration import TOKEN_DIMS, Declaration, SavedTensor
from maxmoe.load.metrics_accumulator import MetricsAccumulator
from maxmoe.nn.aux_loss_watch import AuxLossWatch
from maxmoe.nn.checks import (
    check_inputs,
    check_parts_are_known,
    check_replaced_parts,
    check_step_is_counted,
    needs_gradient,
)
from maxmoe.nn.dense_dispatcher import local_dispatcher
from maxmoe.nn.dispatcher import ExpertRunner
from maxmoe.nn.experts import Experts
from maxmoe.nn.latent_projection import LatentProjection
from maxmoe.nn.losses import BalanceLoss, load_balance_loss
from maxmoe.nn.output import MoEOutput
from maxmoe.nn.routed_experts import run_routed_experts
from maxmoe.nn.router import Router
from maxmoe.nn.routing import Routing
from maxmoe.nn.routing_hooks import HookedModule
from maxmoe.nn.routing_losses import RoutingLosses, RoutingMetrics, compute_metrics
from maxmoe.nn.settings_watch import SettingsWatch
from maxmoe.nn.shared_experts import SharedExperts
from maxmoe.nn.zero_computation_experts import ZeroComputationExperts
from maxmoe.ops import ActivationFunction
from maxmoe.token_group import LocalTokens, TokenGroupAttribute
from maxmoe.upcycling import DenseBlock, Projection, Scaling, Upcycling, initialize


class MoE(HookedModule):
    """A Mixture-of-Experts feed-forward layer.

    hidden_states[t] = sum_k weights[t, k] * expert[experts[t, k]](x[t]) + shared_experts(x[t])

    Ids from `num_experts` on are those of `ZeroComputationExperts`. Latent experts lie between two `LatentProjection`.

    The forward does not change the state of the layer, so that a recomputation under activation checkpointing neither
    routes differently nor counts twice. The training loop calls `update_correction_bias` after the optimizer step.

    Args:
        config: sizes, routing, experts and losses of the layer.
        router: module that routes instead of `maxmoe.nn.Router`, called as ``router(x, token_mask)`` with x
            ``(B, S, D)`` and the mask ``(B * S,)`` or None, during a replay also with `experts` ``(B * S, K)``. It
            returns a `maxmoe.nn.Routing`; see `Routing.of`. Fields of the config about routing are not read.
        activation: elementwise function of gate ``(R, F)``, None without a gate, and up ``(R, F)`` that replaces the
            activation of the config in routed and shared experts. Autograd differentiates it and saves more tensors.
        balance_loss: function with the arguments of `maxmoe.nn.load_balance_loss` that replaces it.
        device: device of the parameters, which may be "meta".
        dtype: dtype of the parameters.

    Raises:
        TypeError: if the config is not a `MoEConfig`, or the router not a module.
        ValueError: if the config contradicts what replaces a part of it.
    """

    recompute_names = ("dispatch",)
    recompute: frozenset[str] = frozenset()  # see `maxmoe.set_recompute`

    token_group = TokenGroupAttribute()

    def __init__(
        self,
        config: MoEConfig,
        *,
        router: nn.Module | None = None,
        activation: ActivationFunction | None = None,
        balance_loss: BalanceLoss | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config must be a maxmoe.MoEConfig, got {type(config).__name__}")
        check_replaced_parts(config, router, activation, balance_loss)
        self.config = config
        self.router: nn.Module = Router(config, device=device, dtype=dtype) if router is None else router
        self.experts = Experts(config, activation=activation, device=device, dtype=dtype)
        self.shared_experts: SharedExperts | None = None
        if config.num_shared_experts:
            self.shared_experts = SharedExperts(config, activation=activation, device=device, dtype=dtype)
        is_latent = config.latent_size is not None
        self.latent_in = LatentProjection(config, "in", device=device, dtype=dtype) if is_latent else None
        self.latent_out = LatentProjection(config, "out", device=device, dtype=dtype) if is_latent else None
        self.zero_computation_experts = None
        if config.has_zero_computation_outputs:
            self.zero_computation_experts = ZeroComputationExperts(config, device=device, dtype=dtype)
        self.set_up_training(load_balance_loss if balance_loss is None else balance_loss)

    def set_up_training(self, balance_loss: BalanceLoss) -> None:
        """Set all that is not a module or a parameter."""
        self.runner = ExpertRunner(local_dispatcher(self.config))
        self.losses = RoutingLosses(self.config, balance_loss)
        self.token_group = LocalTokens()
        self.metrics_accumulator: MetricsAccumulator | None = None  # set by StatsAccumulator
        self.aux_loss_watch, self.settings_watch = AuxLossWatch(), SettingsWatch()

    @classmethod
    def from_dense(
        cls,
        config: MoEConfig,
        gate_proj: Projection | None,
        up_proj: Projection,
        down_proj: Projection,
        *,
        scaling: Scaling = "down_proj",
        noise: float = 0.0,
        reinitialized: float = 0.0,
    ) -> Self:
        """Create a layer from a dense feed-forward block, whose weights are copied.

        The dense block of width W is cut into W / F slices of F = `intermediate_size` channels. The shared experts hold
        the first `num_shared_experts` slices, expert e slice e mod G of the G others. With F = W, experts are copies of
        the block. The rows of the router are drawn at random, one for each G experts, so that a token selects all of
        their slices or none. If the routing weights are normalized, the layer computes the dense block; with
        normalization="none", only while the weight of the router is zero.

        Args:
            config: config of the layer. `num_experts` and `top_k` must be multiples of G.
            gate_proj: gate of the dense block, an `nn.Linear` or its weight ``(W, D)``; None with ``gated=False``.
            up_proj: first projection, an `nn.Linear` or its weight ``(W, D)``.
            down_proj: last projection, an `nn.Linear` or its weight ``(D, W)``.
            scaling: tensors that the factor G / (sum of the routing weights of a token) multiplies: "down_proj"; "all"
                matrices of an expert, by its cube or square root, exact for "relu", and "relu2" without a gate; "none".
            noise: standard deviation of Gaussian noise on the matrices of routed experts, divided by theirs.
            reinitialized: fraction of the channels of each routed expert that are drawn anew, from normal distributions
                with the mean and standard deviation of the channels that they replace.

        Returns:
            Layer with the dtype and device of `up_proj`, all of whose parameters are trained.

        Raises:
            TypeError: for a projection that is neither an `nn.Linear` nor a tensor.
            ValueError: for shapes or options that do not fit, with both values.

        Source: arXiv:2212.05055 (copies); arXiv:2410.07524 (slices, virtual groups, scaling="all"); arXiv:2502.19261
        (reinitialized).
        """
        block, options = DenseBlock.of(config, gate_proj, up_proj, down_proj), Upcycling(scaling, noise, reinitialized)
        options.output_scale(block)  # raises before the layer is created
        up = block.matrices["up_proj"]
        layer = cls(config, device=up.device, dtype=up.dtype)
        initialize(layer, block, options)
        return layer

    @classmethod
    def from_transformers(cls, block: nn.Module) -> Self:
        """Create a layer from the sparse block of a transformers model.

        The weights are moved one by one, gradients are not, and the block is left on the meta device.

        Args:
            block: sparse block of a family in `maxmoe.presets`, such as `MixtralSparseMoeBlock`.

        Returns:
            Layer with the dtypes, device and `requires_grad` of the block.

        Raises:
            ValueError: for a block of another family or kind; no tensor is moved then.
        """
        dtype = next((parameter.dtype for parameter in block.parameters()), None)
        layer = cls(config_of_block(block), device="meta", dtype=dtype)
        take_weights(layer, block)
        return layer.train(block.training)

    def to_transformers(self, block: nn.Module) -> None:
        """Move the weights of this layer to the sparse block of a transformers model.

        The weights are moved one by one, gradients are not, and the layer is left on the meta device.

        Args:
            block: sparse block of a family in `maxmoe.presets`. Its own weights, which may be on meta, are dropped.

        Raises:
            ValueError: if the block computes another function or has other shapes; no tensor is moved then.
        """
        check_parts_are_known(self, "to_transformers")
        check_block(self.config, block)
        give_weights(self, block)

    def set_runner(self, runner: ExpertRunner) -> None:
        """Replace the runner of the routed experts; `maxmoe.parallelize` sets a runner that communicates.

        Args:
            runner: runner with dispatcher, tensor-parallel region and number of chunks.
        """
        self.runner = runner

    def reset_parameters(self) -> None:
        """Initialize all parameters; those of a custom router by its method `reset_parameters`, if it has one."""
        for part in self.children():
            getattr(part, "reset_parameters", lambda: None)()

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> MoEOutput:
        """Route the tokens and compute their experts.

        Padding is not routed: its output and its gradient are zero, it does not contribute to losses, statistics or
        capacities, and its values, which may be NaN, affect no result. The bound of `buffer_factor` counts padding.

        Args:
            x: ``(..., S, D)``, floating, sequences of S tokens; ``(T, D)`` is one sequence.
            token_mask: ``(..., S)``, bool, False for padding; None for no padding.

        Returns:
            Hidden states, auxiliary loss and routing statistics.

        Raises:
            ValueError: if the last dim of x is not `hidden_size`, x does not have the dtype of the parameters, or the
                mask is not bool or has another shape.
        """
        hidden_states, metrics = self.output_and_metrics(x, token_mask)
        return MoEOutput(hidden_states, metrics.aux_loss, metrics.stats)

    def output_and_metrics(self, x: Tensor, token_mask: Tensor | None) -> tuple[Tensor, RoutingMetrics]:
        """Compute as `forward`."""
        hidden_states, routing, dropped = self.hidden_states_and_routing(x, token_mask)
        metrics = compute_metrics(self, routing, dropped, math.prod(x.shape[:-2]))
        sums, router = self.metrics_accumulator, self.balanced_router
        not_counted = "its StatsAccumulator would not count the call: make none"
        if sums is not None and needs_gradient(self, hidden_states, not_counted):
            hidden_states = sums.add(hidden_states, metrics.aux_loss, metrics.stats)
            if sums.histogram is not None and router is not None:
                hidden_states = sums.histogram.add(hidden_states, router.required_bias_histogram(routing))
        if hidden_states.requires_grad:
            self.aux_loss_watch.watch(self, hidden_states, metrics.aux_loss)
            self.settings_watch.watch(self, hidden_states, metrics.aux_loss)
        return hidden_states, metrics

    def hidden_states_and_routing(self, x: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Routing, Tensor]:
        """Compute hidden states and routing as `forward`, and the number of slots that this rank has dropped."""
        tokens, token_mask = self.checked_tokens(x, token_mask)
        region = self.runner.region
        # One tensor per part of the layer, because the gradients of the parts are reduced differently.
        inputs = region.enter(tokens)
        routing, routed, dropped = run_routed_experts(self, inputs, token_mask, x.shape[:-1])
        shared = None if self.shared_experts is None else self.shared_experts(inputs.shared_experts, token_mask)
        whole = None
        if self.zero_computation_experts is not None:
            # Under autocast, the experts return another dtype than x has.
            whole = self.zero_computation_experts(inputs.router, routing.top_k, routed.dtype)
        # The region sums partial outputs of both, in one collective if they are partial over the same axes.
        hidden_states = region.leave(routed, shared, whole)
        # A view would lose the backward hook that FSDP registers on this tensor.
        hidden_states = reshaped(hidden_states.contiguous(), (*x.shape[:-1], hidden_states.shape[1]))
        return hidden_states, routing, dropped

    def checked_tokens(self, x: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Check the inputs of `forward`; return tokens ``(T, D)``, zero for padding, and their mask ``(T,)``."""
        check_inputs(x, token_mask, self.config.hidden_size, self._dtype)
        check_step_is_counted(self)
        tokens = x.reshape(-1, x.shape[-1])
        if token_mask is None:
            return tokens, None
        token_mask = token_mask.reshape(-1)
        # Zeroed before the first product, so that NaN in padding reaches neither outputs nor gradients.
        return tokens.masked_fill(~token_mask.unsqueeze(1), 0.0), token_mask

    @property
    def declaration(self) -> Declaration:
        """Declare saved tensors; router and experts declare their parameters."""
        return Declaration(
            # The capacity of an expert is per sequence, and filled in the order of the tokens.
            needs_whole_sequences=self.config.capacity_factor is not None,
            saved_tensors=self._saved_tensors,
        )

    def _saved_tensors(self, batch: int, length: int) -> dict[str, SavedTensor]:
        config, wide = self.config, torch.promote_types(self._dtype, torch.float32)
        saved = {"input": SavedTensor((batch, length, config.hidden_size), (*TOKEN_DIMS, None))}
        if config.has_zero_computation_outputs:  # their module may have no parameter that tells the dtype
            saved["factors"] = SavedTensor((batch, length, 1), (*TOKEN_DIMS, None), wide)
        return saved | self.losses.saved_tensors(batch, length, wide)

    def update_correction_bias(self, tokens_per_expert: Tensor) -> None:
        """Take one step of loss-free balancing; see `Router.update_correction_bias`.

        Args:
            tokens_per_expert: ``(E,)``, integer, `MoEStats.tokens_per_expert`, summed over an optimizer step.
        """
        if self.balanced_router is None:
            raise ValueError("update_correction_bias needs score_correction_bias=True in the config, got False")
        self.balanced_router.update_correction_bias(tokens_per_expert)

    @property
    def balanced_router(self) -> Router | None:
        """Router whose correction bias balances the load, without adapters that wrap it; None without such a bias."""
        return without_adapters(self.router, Router) if self.config.score_correction_bias else None

    @property
    def routed_experts(self) -> Experts:
        """Module of the routed experts, without adapters that wrap it."""
        return without_adapters(self.experts, Experts)

    @property
    def _dtype(self) -> torch.dtype:
        return self.routed_experts.up_proj.dtype

    def extra_repr(self) -> str:
        """Return the fields of the config that differ from their default."""
        fields = dataclasses.fields(self.config)
        changed = (field.name for field in fields if getattr(self.config, field.name) != field.default)
        return ", ".join(f"{name}={getattr(self.config, name)!r}" for name in changed)
