"""Mixture-of-Experts layer."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from maxmoe._torch import is_traced, reshaped
from maxmoe._torch.forward_values import of_forward
from maxmoe.adapters import without_adapters
from maxmoe.config import MoEConfig
from maxmoe.convert.blocks import check_block, config_of_block, give_weights, take_weights
from maxmoe.convert.upcycling import Projection, Scaling, upcycled
from maxmoe.declaration import Declaration
from maxmoe.expert_load.metrics_accumulator import MetricsAccumulator
from maxmoe.expert_load.stats import MoEStats
from maxmoe.nn.checks import (
    check_mask,
    check_parts_are_known,
    check_replaced_parts,
    check_tokens,
    checked_state,
    needs_gradient,
)
from maxmoe.nn.dispatcher import ExpertRunner, LayerInputs, sum_of
from maxmoe.nn.experts import Experts
from maxmoe.nn.local_dispatcher import local_dispatcher
from maxmoe.nn.losses import LOCAL, BalanceLoss, RoutingLosses, load_balance_loss
from maxmoe.nn.output import MoEOutput, StatefulMoEOutput
from maxmoe.nn.parts import LatentProjection, SharedExperts, ZeroComputationExperts
from maxmoe.nn.replay import given_experts, observe
from maxmoe.nn.rms_norm import LatentNorm
from maxmoe.nn.routed_experts import OneOperator
from maxmoe.nn.router import Router, is_custom_router
from maxmoe.nn.routing import Routing, checked_routing
from maxmoe.nn.training_watch import TrainingWatch
from maxmoe.ops import ActivationFunction
from maxmoe.ranks.token_group import LocalTokens, TokenGroupAttribute
from maxmoe.recompute.selective import has_backward


class MoE(nn.Module):
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

    recompute_names = ("dispatch",)
    recompute: frozenset[str] = frozenset()  # see `maxmoe.set_recompute`

    token_group = TokenGroupAttribute()
    routing_hooks: tuple[Any, ...] = ()  # set by `record_routing` and `replay_routing`
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
        super().__init__()
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config must be a maxmoe.MoEConfig, got {type(config).__name__}")
        check_replaced_parts(config, router, activation, balance_loss)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.router: nn.Module = config.router_rule.make(config, **options) if router is None else router
        self.experts = Experts(config, activation=activation, **options)
        has_shared = config.num_shared_experts > 0
        self.shared_experts = SharedExperts(config, activation=activation, **options) if has_shared else None
        is_latent = config.latent_size is not None
        self.latent_in = LatentProjection(config, "in", **options) if is_latent else None
        self.latent_out = LatentProjection(config, "out", **options) if is_latent else None
        norms = config.norms
        self.input_norm = LatentNorm(config.hidden_size, norms.eps, offset=0.0, **options) if norms.input else None
        self.sum_norm = LatentNorm(config.hidden_size, norms.eps, offset=0.0, **options) if norms.sum else None
        has_more = config.has_zero_computation_outputs
        self.zero_computation_experts = ZeroComputationExperts(config, **options) if has_more else None
        self.set_up_training(load_balance_loss if balance_loss is None else balance_loss)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles have no hooks, because a context holds for the module that it got.
        return {key: value for key, value in self.__dict__.items() if key not in ("routing_hooks", "one_operator")}

    def set_up_training(self, balance_loss: BalanceLoss) -> None:
        """Set all that is not a module or a parameter."""
        self.runner = ExpertRunner(local_dispatcher(self.config))  # `maxmoe.parallelize` sets one that communicates
        self.losses = RoutingLosses(self.config, balance_loss)
        self.token_group = LocalTokens()
        self.metrics_accumulator: MetricsAccumulator | None = None  # set by StatsAccumulator
        self.training_watch = TrainingWatch()

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
        self, x: Tensor, token_mask: Tensor | None = None, router_state: Tensor | None = None
    ) -> MoEOutput | StatefulMoEOutput:
        """Route the tokens and compute their experts.

        Padding is not routed: its output and its gradient are zero, it does not contribute to losses, statistics or
        capacities, and its values, which may be NaN, affect no result. The bound of `buffer_factor` counts padding.

        Args:
            x: ``(..., S, D)``, floating, sequences of S tokens; ``(T, D)`` is one sequence.
            token_mask: ``(..., S)``, bool, False for padding; None for no padding.
            router_state: ``(..., S, R)``, floating, what the layer before has returned, for a router that takes it.

        Returns:
            Hidden states, auxiliary loss and routing statistics; also the state of a router that has one.

        Raises:
            ValueError: if the last dim of x is not `hidden_size`, x does not have the dtype of the parameters, the mask
                is not bool or has another shape, or a state is missing, superfluous or has another shape.
        """
        hidden_states, routing, dropped = self.hidden_states_and_routing(x, token_mask, router_state)
        aux_loss, stats = self.losses_and_stats(routing, dropped, math.prod(x.shape[:-2]))
        hidden_states = self.observed(hidden_states, routing, aux_loss, stats)
        if routing.state is None:
            return MoEOutput(hidden_states, aux_loss, stats)
        return StatefulMoEOutput(hidden_states, aux_loss, stats, routing.state)

    def hidden_states_and_routing(
        self, x: Tensor, token_mask: Tensor | None, router_state: Tensor | None
    ) -> tuple[Tensor, Routing, Tensor]:
        """Return hidden states, routing and its state as `forward`, and the number of slots that this rank drops."""
        hooks, mask = self.routing_hooks, None if token_mask is None else token_mask.reshape(-1)
        # Hooks that give no experts do not decide: a recomputation, which may have others, takes the same way.
        given = given_experts(hooks, x.shape[:-1], x.device, mask) if hooks else None
        is_plain = token_mask is None and given is None and router_state is None and not is_traced()
        if self.metrics_accumulator is None and torch.is_grad_enabled() and self._balances_step():
            raise ValueError(
                "load_balance_scope 'step' needs maxmoe.StatsAccumulator(model), whose update() ends the step, got none"
            )
        if is_plain and (in_one := self._in_one_operator(x)) is not None:
            return in_one
        leading_dims = x.shape[:-1]
        check_tokens(x, self.config.hidden_size, self.expert_dtype)
        tokens = x.reshape(-1, x.shape[-1])
        if token_mask is not None:
            check_mask(token_mask, x)
            # Zeroed before the first product, so that NaN in padding reaches neither outputs nor gradients.
            tokens = tokens.masked_fill(~token_mask.reshape(-1, 1), 0.0)
        if router_state is not None or self.config.router_rule.takes_state:
            router_state = checked_state(self.config.router_rule, router_state, x, mask)
        region = self.runner.region
        # One tensor per part of the layer, because the gradients of the parts are reduced differently.
        inputs = region.enter(tokens)
        routing = self._route(inputs.router, mask, leading_dims, given, router_state)
        rows = inputs.experts
        for part in (self.input_norm, self.latent_in):
            rows = rows if part is None else part(rows)
        if self.config.maps_rows:
            rows = region.copy_to_experts(rows)
        routed, dropped = self.runner.run(  # dispatch, experts, combine
            self._expert_function,
            rows,
            region.assign(routing.top_k),
            num_sequences=math.prod(leading_dims[:-1]),
            recompute="dispatch" in self.recompute,
        )
        latent_out, sum_norm = self.latent_out, self.sum_norm
        if self.config.maps_rows:
            routed = region.reduce_from_experts(routed)
        if latent_out is not None:
            routed = latent_out(routed)
        if hooks:
            observe(hooks, routing.experts, leading_dims)
        # The region sums partial outputs of both, in one collective if they are partial over the same axes.
        others = self._compute_others(inputs, mask, routing, routed.dtype)
        if sum_norm is not None:
            routed, others = sum_norm(region.whole_sum(routed, *others)), (None, None)
        hidden_states = region.leave(routed, *others)
        # A view would lose the backward hook that FSDP registers on this tensor.
        if routing.state is not None:
            routing = routing._replace(state=reshaped(routing.state, (*leading_dims, routing.state.shape[1])))
        return reshaped(hidden_states.contiguous(), (*leading_dims, hidden_states.shape[1])), routing, dropped

    def _in_one_operator(self, x: Tensor) -> tuple[Tensor, Routing, Tensor] | None:
        """Compute `hidden_states_and_routing` of tokens without a mask in one process; None where parts must run."""
        operator = OneOperator.of(self)
        if operator is None:
            return None
        tokens = x.reshape(-1, x.shape[-1]) if operator.has_others and x.dim() > 2 else x
        if (computed := operator(tokens)) is None:
            return None
        hidden_states, routing, dropped = computed
        if self.routing_hooks:
            observe(self.routing_hooks, routing.experts, x.shape[:-1])
        if operator.has_others:
            others = self._compute_others(LayerInputs(tokens, tokens, tokens), None, routing, hidden_states.dtype)
            hidden_states = reshaped(sum_of(hidden_states, *others).contiguous(), x.shape)
        return hidden_states, routing, dropped

    def _route(
        self,
        x: Tensor,
        token_mask: Tensor | None,
        leading_dims: Sequence[int],
        given: Tensor | None,
        state: Tensor | None,
    ) -> Routing:
        """Route tokens ``(T, D)`` whose leading dims were ``(..., S)``; to given experts ``(T, K)`` in a replay."""
        is_custom = is_custom_router(self.router)
        if is_custom or self.config.router == "random":  # only then, because two dims fix the sizes in torch.export
            x = x.view(math.prod(leading_dims[:-1]), leading_dims[-1], x.shape[1])
        if is_custom:
            return checked_routing(self.router, self.config, x, token_mask, given)
        options = {} if given is None else {"experts": given}
        if state is not None:
            options["state"] = state
        routing: Routing = self.router(x, token_mask, **options)
        return routing

    def _compute_others(
        self, inputs: LayerInputs, token_mask: Tensor | None, routing: Routing, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the outputs of the shared and the zero-computation experts; None for a part that the layer lacks."""
        shared = None
        if self.shared_experts is not None:
            weights = () if routing.shared_weights is None else (routing.shared_weights,)
            shared = self.shared_experts(inputs.shared_experts, token_mask, *weights)
        if self.zero_computation_experts is None:
            return shared, None
        # Under autocast, the experts return another dtype than x has.
        return shared, self.zero_computation_experts(inputs.router, routing.top_k, dtype)

    def losses_and_stats(self, routing: Routing, dropped: Tensor, num_sequences: int) -> tuple[Tensor, MoEStats]:
        """Compute the auxiliary loss ``()`` and the statistics of a call over the tokens of all ranks.

        Without a backward they are over this rank's tokens alone, and the scope "step" has the balance loss of the
        scope "batch", so that evaluation communicates for the hidden states only.
        """
        tokens, sums = self.token_group, self.metrics_accumulator
        step = sums.step if sums is not None and self._balances_step() else None
        communicates = step is not None or not isinstance(tokens, LocalTokens)
        if communicates and not has_backward():
            tokens, step = tokens if self.losses.are_recorded else LOCAL, None
        if not isinstance(tokens, LocalTokens):
            dropped = self.runner.region.all_reduce_dropped(dropped)
        return self.losses(routing, dropped, num_sequences, tokens, step)

    def _balances_step(self) -> bool:
        """Return whether the running forward has a balance loss over its optimizer step."""
        has_loss = self.config.load_balance_loss_weight > 0 and self.config.load_balance_scope == "step"
        return has_loss and of_forward(self, self.training)

    def observed(self, hidden_states: Tensor, routing: Routing, aux_loss: Tensor, stats: MoEStats | None) -> Tensor:
        """Let the `StatsAccumulator` and the watch of the training see a call; return the hidden states with hooks."""
        sums, not_counted = self.metrics_accumulator, "its StatsAccumulator would not count the call: make none"
        if sums is not None and stats is not None and needs_gradient(self, hidden_states, not_counted):
            router = self.balanced_router if sums.num_bins else None
            histogram = None if router is None else router.required_bias_histogram(routing)
            hidden_states = sums.add(hidden_states, aux_loss, stats, histogram)
        if hidden_states.requires_grad:
            self.training_watch.watch(self, hidden_states, aux_loss)
        return hidden_states

    @property
    def declaration(self) -> Declaration:
        """Declare the needs of the layer; router and experts declare their parameters."""
        return Declaration(
            # The capacity of an expert is per sequence, and filled in the order of the tokens.
            needs_whole_sequences=self.config.capacity_factor is not None,
        )

    def update_correction_bias(self, tokens_per_expert: Tensor) -> None:
        """Take one step of loss-free balancing; see `Router.update_correction_bias`."""
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
    def _expert_function(self) -> Callable[..., Tensor]:
        return self.experts  # a function with the arguments of `Experts.forward`, which dispatchers call

    @property
    def expert_dtype(self) -> torch.dtype:
        """Dtype of the matrices of the routed experts."""
        return self.routed_experts.up_proj.dtype

    def extra_repr(self) -> str:
        """Return the fields of the config that differ from their default."""
        fields = dataclasses.fields(self.config)
        changed = (field.name for field in fields if getattr(self.config, field.name) != field.default)
        return ", ".join(f"{name}={getattr(self.config, name)!r}" for name in changed)
