"""Mixture-of-Experts layer."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from maxmoe._torch import child_table, reshaped
from maxmoe.config import MoEConfig
from maxmoe.convert.blocks import check_block, config_of_block, give_weights, take_weights
from maxmoe.convert.upcycling import Projection, Scaling, upcycled
from maxmoe.nn.checks import check_parts_are_known, check_replaced_parts
from maxmoe.nn.dispatcher import LayerInputs, sum_of
from maxmoe.nn.experts import Experts
from maxmoe.nn.layer import MoELayer
from maxmoe.nn.losses import BalanceLoss, load_balance_loss
from maxmoe.nn.output import MoEOutput, StatefulMoEOutput
from maxmoe.nn.parts import LatentProjection, SharedExperts, ZeroComputationExperts
from maxmoe.nn.rms_norm import LatentNorm
from maxmoe.nn.routed_experts import OneOperator
from maxmoe.nn.router import Router, make_router
from maxmoe.nn.routing import Routing
from maxmoe.nn.windows import BufferUse
from maxmoe.ops import ActivationFunction


class MoE(MoELayer):
    """A Mixture-of-Experts feed-forward layer.

    hidden_states[t] = sum_k weights[t, k] * expert[experts[t, k]](x[t]) + shared_experts(x[t])

    Ids >= `num_experts` belong to `ZeroComputationExperts`. Latent experts lie between two `LatentProjection`.

    The forward does not change the state of the layer, so that a recomputation under activation checkpointing neither
    routes differently nor counts twice. The training loop calls `update_correction_bias` after the optimizer step.

    Example::

        config = maxmoe.MoEConfig(hidden_size=512, intermediate_size=256, num_experts=64, top_k=6)
        layer = maxmoe.MoE(config)
        hidden_states, aux_loss, stats = layer(torch.randn(4, 16, 512))  # [batch, sequence, hidden_size]
        (hidden_states.square().mean() + aux_loss).backward()

    Args:
        config: sizes, routing, experts and losses of the layer.
        router: module that routes instead of `maxmoe.nn.Router`, called as ``router(x, token_mask)`` with x
            ``(B, S, D)`` and the mask ``(B * S,)`` or None, during a replay also with `experts` ``(B * S, K)``. It
            returns a `maxmoe.nn.Routing`; see `Routing.of`. Fields of the config about routing are not read.
        activation: elementwise function of gate ``(R, F)``, None without a gate, and up ``(R, F)`` that replaces the
            activation of the config in routed and shared experts. Autograd differentiates it and saves more tensors.
        balance_loss: function with the arguments of `maxmoe.nn.load_balance_loss` that replaces it.
        device: device of the parameters, which may be "meta".

    Raises:
        TypeError: if the config is not a `MoEConfig`, or the router not a module.
        ValueError: if the config contradicts what replaces a part of it.
    """

    one_operator: OneOperator | None = None  # made by the first call

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
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config must be a maxmoe.MoEConfig, got {type(config).__name__}")
        check_replaced_parts(config, router, activation, balance_loss)
        super().__init__(config, load_balance_loss if balance_loss is None else balance_loss)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router: nn.Module = make_router(config, **options) if router is None else router
        self.experts = Experts(config, activation=activation, **options)
        has_shared, has_more = config.num_shared_experts > 0, config.has_zero_computation_outputs
        self.shared_experts = SharedExperts(config, activation=activation, **options) if has_shared else None
        is_latent = config.latent_size is not None
        self.latent_in = LatentProjection(config, "in", **options) if is_latent else None
        self.latent_out = LatentProjection(config, "out", **options) if is_latent else None
        norms = config.norms
        self.input_norm = LatentNorm(config.hidden_size, norms.eps, offset=0.0, **options) if norms.input else None
        self.sum_norm = LatentNorm(config.hidden_size, norms.eps, offset=0.0, **options) if norms.sum else None
        self.zero_computation_experts = ZeroComputationExperts(config, **options) if has_more else None

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
        projections = {"gate_proj": gate_proj, "up_proj": up_proj, "down_proj": down_proj}
        return upcycled(cls, config, projections, scaling=scaling, noise=noise, reinitialized=reinitialized)

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

    def reset_parameters(self) -> None:
        """Initialize all parameters. A custom router is initialized by its method `reset_parameters`, if it has one."""
        for part in self.children():
            getattr(part, "reset_parameters", lambda: None)()

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        router_state: Tensor | None = None,
        router_inputs: Tensor | None = None,
    ) -> MoEOutput | StatefulMoEOutput:
        """Route the tokens and compute their experts.

        Padding is not routed: its output and its gradient are zero, it does not contribute to losses, statistics or
        capacities, and its values, which may be NaN, affect no result. The bound of `buffer_factor` counts padding.

        Args:
            x: ``(..., S, D)``, floating, sequences of S tokens; ``(T, D)`` is one sequence.
            token_mask: ``(..., S)``, bool, False for padding; None for no padding.
            router_state: ``(..., S, R)``, floating, what the layer before has returned, for a router that takes it.
            router_inputs: ``(..., S)``, integer, ids of the tokens or of their documents, for a router that takes them;
                of any value for padding.

        Returns:
            Hidden states, auxiliary loss and routing statistics; also the state of a router that has one.

        Raises:
            ValueError: if the last dim of x is not `hidden_size`, x does not have the dtype of the parameters, the mask
                is not bool or has another shape, or a state or ids are missing, superfluous or have another shape, or
                ids another dtype or range.
        """
        hidden_states, routing, use = self.hidden_states_and_routing(x, token_mask, router_state, router_inputs)
        aux_loss, stats = self.losses_and_stats(routing, use, math.prod(x.shape[:-2]))
        hidden_states = self.observed(hidden_states, routing, aux_loss, stats)
        if routing.state is None:
            return MoEOutput(hidden_states, aux_loss, stats)
        return StatefulMoEOutput(hidden_states, aux_loss, stats, routing.state)

    def in_one_operator(self, x: Tensor) -> tuple[Tensor, Routing, BufferUse] | None:
        """Compute router and routed experts in one operator, and then the others."""
        children, operator = child_table(self), self.one_operator
        router, experts = children.get("router"), children.get("experts")
        if type(router) is not Router or type(experts) is not Experts:
            return None
        if operator is None or operator.parts != (self.config, self.runner, router, experts):
            operator = self.one_operator = OneOperator(self.config, self.runner, router, experts)
        tokens = x.reshape(-1, x.shape[-1]) if operator.has_others and x.dim() > 2 else x
        if (computed := operator(tokens)) is None or not operator.has_others:
            return computed
        routed, routing, use = computed
        others = self.compute_others(LayerInputs(tokens, tokens, tokens), None, routing, routed.dtype)
        return reshaped(sum_of(routed, *others).contiguous(), x.shape), routing, use
