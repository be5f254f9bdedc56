"""What all Mixture-of-Experts layers do, given their parts."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maxmoe._torch import is_traced, reshaped
from maxmoe._torch.forward_values import of_forward
from maxmoe.adapters import adapted_module, without_adapters
from maxmoe.config import MoEConfig
from maxmoe.declaration import Declaration
from maxmoe.expert_load.metrics_accumulator import MetricsAccumulator
from maxmoe.expert_load.stats import MoEStats
from maxmoe.nn.checks import check_mask, check_tokens, checked_ids, checked_state, needs_gradient
from maxmoe.nn.dispatcher import ExpertRunner, LayerInputs
from maxmoe.nn.experts import Experts
from maxmoe.nn.local_dispatcher import local_dispatcher
from maxmoe.nn.losses import LOCAL, BalanceLoss, RoutingLosses, load_balance_loss
from maxmoe.nn.replay import given_experts, observe
from maxmoe.nn.router import Router, is_custom_router
from maxmoe.nn.routing import Routing, checked_routing
from maxmoe.nn.training_watch import TrainingWatch
from maxmoe.nn.windows import BufferUse
from maxmoe.ranks.token_group import LocalTokens, TokenGroupAttribute
from maxmoe.recompute.selective import has_backward


class RouterInputs(NamedTuple):
    """What a router gets in a call of a layer."""

    x: Tensor  # (T, D), tokens
    leading_dims: Sequence[int]  # (..., S), of the input of the layer
    token_mask: Tensor | None  # (T,)
    experts: Tensor | None  # (T, K), of a replay
    state: Tensor | None  # (T, R), of the router of the layer before
    ids: Tensor | None  # (B, S), of the tokens or of their documents


class MoELayer(nn.Module):
    """Base of Mixture-of-Experts layers, whose parts have the names and arguments of the modules of `MoE`.

    With modules of another library, a subclass overrides `part`, `route`, `expert_function`, `latent_projections`,
    `compute_others`, `balanced_router` and `expert_dtype`.
    """

    recompute_names = ("dispatch",)
    recompute: frozenset[str] = frozenset()  # see `maxmoe.set_recompute`

    token_group = TokenGroupAttribute()
    routing_hooks: tuple[Any, ...] = ()  # set by `record_routing` and `replay_routing`

    def __init__(self, config: MoEConfig, balance_loss: BalanceLoss = load_balance_loss) -> None:
        super().__init__()
        self.config = config
        self.runner = ExpertRunner(local_dispatcher(config))  # `maxmoe.parallelize` sets one that communicates
        self.losses = RoutingLosses(config, balance_loss)
        self.token_group = LocalTokens()
        self.metrics_accumulator: MetricsAccumulator | None = None  # set by StatsAccumulator
        self.training_watch = TrainingWatch()

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles have no hooks, because a context holds for the module that it got.
        return {key: value for key, value in self.__dict__.items() if key not in ("routing_hooks", "one_operator")}

    def part(self, name: str) -> Any:
        """Return a part, with the adapters around it: "router", "experts", "shared_experts" ...; None without it."""
        return getattr(self, name)

    def route(self, inputs: RouterInputs) -> Routing:
        """Call the router."""
        x, leading_dims, token_mask, *others = inputs
        router: nn.Module = self.part("router")
        is_custom = is_custom_router(router)
        if is_custom or self.config.router == "random":  # only then, because two dims fix the sizes in torch.export
            x = x.view(math.prod(leading_dims[:-1]), leading_dims[-1], x.shape[1])
        if is_custom:
            return checked_routing(router, self.config, x, token_mask, inputs.experts)
        names = ("experts", "state", "ids")
        options = {name: each for name, each in zip(names, others, strict=True) if each is not None}
        routing: Routing = router(x, token_mask, **options)
        return routing

    def expert_function(self) -> Callable[..., Tensor]:
        """Return the function that computes the experts, with the arguments of `Experts.forward`."""
        experts: nn.Module = self.part("experts")
        return experts

    def latent_projections(self) -> tuple[Callable[[Tensor], Tensor] | None, Callable[[Tensor], Tensor] | None]:
        """Return the functions of rows before and after latent experts; None for experts of the tokens themselves."""
        return self.part("latent_in"), self.part("latent_out")

    def compute_others(
        self, inputs: LayerInputs, token_mask: Tensor | None, routing: Routing, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the output of shared and zero-computation experts, as `TensorParallelRegion.leave` takes them."""
        shared_experts, others, shared = self.part("shared_experts"), self.part("zero_computation_experts"), None
        if shared_experts is not None:
            shared = shared_experts(inputs.shared_experts, token_mask, routing.shared_weights)
        # Under autocast, the experts return another dtype than x has.
        return shared, None if others is None else others(inputs.router, routing.top_k, dtype)

    @property
    def balanced_router(self) -> Router | None:
        """Router whose correction bias balances the load, without adapters that wrap it; None without such a bias."""
        return without_adapters(self.part("router"), Router) if self.config.score_correction_bias else None

    @property
    def routed_experts(self) -> nn.Module:
        """Module of the routed experts, without adapters that wrap it."""
        return adapted_module(self.part("experts"))

    @property
    def expert_dtype(self) -> torch.dtype:
        """Dtype of the matrices of the routed experts."""
        return without_adapters(self.part("experts"), Experts).up_proj.dtype

    def hidden_states_and_routing(
        self, x: Tensor, token_mask: Tensor | None, router_state: Tensor | None, router_inputs: Tensor | None
    ) -> tuple[Tensor, Routing, BufferUse]:
        """Return hidden states, routing and its state as `forward`, and the use of this rank's buffer."""
        hooks, leading_dims = self.routing_hooks, x.shape[:-1]
        mask = None if token_mask is None else token_mask.reshape(-1)
        # Hooks that give no experts do not decide: a recomputation, which may have others, takes the same way.
        given = given_experts(hooks, leading_dims, x.device, mask) if hooks else None
        if self.metrics_accumulator is None and torch.is_grad_enabled() and self._balances_step():
            raise ValueError(
                "load_balance_scope 'step' needs maxmoe.StatsAccumulator(model), whose update() ends the step, got none"
            )
        is_plain = token_mask is None and given is None and router_state is None and router_inputs is None
        computed = self.in_one_operator(x) if is_plain and not is_traced() else None
        if computed is None:
            check_tokens(x, self.config.hidden_size, self.expert_dtype)
            tokens = x.reshape(-1, x.shape[-1])
            if token_mask is not None:
                check_mask(token_mask, x)
                # Zeroed before the first product, so that NaN in padding reaches neither outputs nor gradients.
                tokens = tokens.masked_fill(~token_mask.reshape(-1, 1), 0.0)
            if router_state is not None or self.config.router_rule.takes_state:
                router_state = checked_state(self.config.router_rule, router_state, x, mask)
            if router_inputs is not None or self.config.router_rule.takes_ids is not None:
                router_inputs = checked_ids(self.config.router_rule, router_inputs, x, mask)
            # One tensor per part of the layer, because the gradients of the parts are reduced differently.
            inputs = self.runner.region.enter(tokens)
            of_router = RouterInputs(inputs.router, leading_dims, mask, given, router_state, router_inputs)
            computed = self._in_parts(inputs, of_router)
        if hooks:
            observe(hooks, computed[1].experts, leading_dims)
        return computed

    def in_one_operator(self, x: Tensor) -> tuple[Tensor, Routing, BufferUse] | None:
        """Compute `hidden_states_and_routing` of tokens without a mask in one process; None where parts must run."""
        return None

    def _in_parts(self, inputs: LayerInputs, of_router: RouterInputs) -> tuple[Tensor, Routing, BufferUse]:
        """Compute `hidden_states_and_routing` by a call of each part."""
        region, leading_dims, maps_rows = self.runner.region, of_router.leading_dims, self.config.maps_rows
        routing = self.route(of_router)
        (latent_in, latent_out), rows = self.latent_projections(), inputs.experts
        for part in (self.part("input_norm"), latent_in):
            rows = rows if part is None else part(rows)
        routed, use = self.runner.run(  # dispatch, experts, combine
            self.expert_function(),
            region.copy_to_experts(rows) if maps_rows else rows,
            region.assign(routing.top_k),
            num_sequences=math.prod(leading_dims[:-1]),
            recompute="dispatch" in self.recompute,
        )
        routed = region.reduce_from_experts(routed) if maps_rows else routed
        routed = routed if latent_out is None else latent_out(routed)
        others = self.compute_others(inputs, of_router.token_mask, routing, routed.dtype)
        if (sum_norm := self.part("sum_norm")) is not None:
            routed, others = sum_norm(region.whole_sum(routed, *others)), (None, None)
        # The region sums partial outputs of both, in one collective if they are partial over the same axes.
        hidden_states = region.leave(routed, *others)
        if routing.state is not None:
            routing = routing._replace(state=reshaped(routing.state, (*leading_dims, routing.state.shape[1])))
        # A view would lose the backward hook that FSDP registers on this tensor.
        return reshaped(hidden_states.contiguous(), (*leading_dims, hidden_states.shape[1])), routing, use

    def losses_and_stats(self, routing: Routing, use: BufferUse, num_sequences: int) -> tuple[Tensor, MoEStats]:
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
            use = use._replace(dropped=self.runner.region.all_reduce_dropped(use.dropped))
        return self.losses(routing, use, num_sequences, tokens, step)

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
        # The capacity of an expert is per sequence, and filled in the order of the tokens.
        return Declaration(needs_whole_sequences=self.config.capacity_factor is not None)

    def update_correction_bias(self, tokens_per_expert: Tensor) -> None:
        """Take one step of loss-free balancing; see `Router.update_correction_bias`."""
        if self.balanced_router is None:
            raise ValueError("update_correction_bias needs score_correction_bias=True in the config, got False")
        self.balanced_router.update_correction_bias(tokens_per_expert)

    def extra_repr(self) -> str:
        """Return the fields of the config that differ from their default."""
        fields = dataclasses.fields(self.config)
        changed = (field.name for field in fields if getattr(self.config, field.name) != field.default)
        return ", ".join(f"{name}={getattr(self.config, name)!r}" for name in changed)
