"""Router of a layer: linear, then the best experts of each token; the rules that balance their load."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe._torch import ConvertedModule
from maxmoe.adapters import adapted_module
from maxmoe.config import MoEConfig
from maxmoe.declaration import Declaration
from maxmoe.expert_load.stats_accumulator import NUM_BINS
from maxmoe.nn.module_path import module_path
from maxmoe.nn.random_numbers import rand_of_tokens
from maxmoe.nn.routing import Routing, completed
from maxmoe.ops import linear, route
from maxmoe.ranks.token_group import LocalTokens, TokenGroupAttribute


class Router(ConvertedModule):
    """Linear map to logits, then `maxmoe.ops.route`, both in float32 or wider for any dtype of the input.

    logits = x @ weight^T + bias

    Families with another rule have a subclass, which their `maxmoe.config.components.RouterRule` makes. It adds its own
    parameters in `add_parts`, and initializes them in `reset_parameters`.

    Args:
        **options: device and dtype of the parameters; `score_correction_bias` is float32 or wider.

    Attributes:
        is_plain: whether the linear map and `maxmoe.ops.route` are all that the router computes.
    """

    weight: Tensor
    bias: Tensor | None
    score_correction_bias: Tensor | None

    token_group = TokenGroupAttribute()  # for the random router

    def __init__(self, config: MoEConfig, **options: Any) -> None:
        super().__init__()
        self.config, self.rule = config, config.router_rule
        self.is_plain = type(self) is Router and self.rule.is_plain(config) and config.router != "random"
        self.token_group = LocalTokens()
        num_experts = config.num_selectable_experts
        num_rows = num_experts + (config.num_shared_experts if self.rule.scores_shared_experts else 0)
        self.weight = nn.Parameter(torch.empty(num_rows, self.rule.row_size(config), **options))
        bias = nn.Parameter(torch.empty(num_rows, **options)) if config.router_bias else None
        self.register_parameter("bias", bias)
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        correction_bias = self.weight.new_empty(num_experts, dtype=wide) if config.score_correction_bias else None
        self.register_buffer("score_correction_bias", correction_bias)
        self.register_load_state_dict_post_hook(_widen_correction_bias)  # type: ignore[no-untyped-call]
        self.add_parts(**options)
        self.reset_parameters()

    def add_parts(self, **options: Any) -> None:
        """Add the parameters, buffers and modules that a subclass has beside those of `Router`."""

    def reset_parameters(self) -> None:
        """Initialize biases to 0, and the weight so that variance 1 gives logits of variance 1."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        for bias in (self.bias, self.score_correction_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        experts: Tensor | None = None,
        state: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Routing:
        """Route tokens.

        Args:
            x: ``(B, S, D)`` or ``(T, D)``, floating, tokens; must be finite where `token_mask` is False.
            token_mask: ``(T,)``, bool, False for padding, which is not routed.
            experts: ``(T, K)``, int64, experts to route to, whose scores give the weights; -2 for no expert, -1 in all
                slots of a token to choose its experts here. None to choose the experts with the best scores.
            state: ``(T, R)``, floating, state of the router of the layer before, for a router that takes one.
            ids: ``(B, S)``, int64, ids of tokens or documents, 0 for padding, for a router that takes them.

        Returns:
            Logits, probabilities, weights and expert ids; the state of this layer if the router has one.

        Raises:
            ValueError: for NaN scores, with the path of the router in the model.
        """
        rows, state = self.hidden_rows(x.flatten(0, -2), state)
        logits = self.rule.logits(linear(rows, self.weight, self.bias))
        if self.config.router == "random":
            # The values are noise, but the gradient flows to the logits: a balanced load with the cost of training.
            sequences = logits.view(x.shape[:-2].numel(), x.shape[-2], logits.shape[1])
            noise = torch.special.ndtri(rand_of_tokens(sequences, self.token_group)).view_as(logits)
            logits = logits + (noise - logits).detach()
        try:
            # Also in a replay, in which only some ranks may have tokens without a route: it may communicate.
            selected = None if ids is None else self.select_by_ids(logits.detach(), ids, token_mask)
            routing = select_experts(self.config, logits, self.score_correction_bias, token_mask, experts, selected)
        except ValueError as error:
            raise ValueError(f"{module_path(self)}: {error}") from error
        return self.scaled(routing if state is None else routing._replace(state=state))

    def hidden_rows(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the input of the linear map and the state of this layer, given tokens ``(T, D)`` and a state."""
        return x, None

    def select_by_ids(self, logits: Tensor, ids: Tensor, token_mask: Tensor | None) -> Tensor:
        """Select experts ``(T, K)``, given logits ``(T, E)`` and ids ``(B, S)``, in a router that takes ids."""
        raise NotImplementedError

    def scaled(self, routing: Routing) -> Routing:
        """Multiply the routing weights by trained numbers, in a router that has some."""
        return routing

    @property
    def declaration(self) -> Declaration:
        """Declare logical names."""
        return Declaration(logical_names={"weight": (None, "embed_router"), "bias": (None,)})

    def before_conversion(self) -> Callable[[], None]:
        """Keep the correction bias in float32 or wider, because its small updates would be rounded away in 16 bits."""
        before = self.score_correction_bias

        def restore() -> None:
            after = self.score_correction_bias
            if before is not None and after is not None and after.dtype.itemsize < 4:
                self.score_correction_bias = before.to(after.device)

        return restore

    def wide_correction_bias(self) -> Tensor:
        """Return the correction bias; raise if there is none, or one of 16 bits, in which small steps would be lost."""
        bias = self.score_correction_bias
        if bias is None or bias.dtype.itemsize < 4:
            got = None if bias is None else bias.dtype
            raise ValueError(
                f"score_correction_bias must be float32 or wider, because small updates are lost in 16 bits, got {got}"
            )
        return bias

    @torch.no_grad()
    def update_correction_bias(self, tokens_per_expert: Tensor) -> None:
        """Update the correction bias so that experts with fewer tokens than the mean are selected more often.

        bias[e] += rate * sign(mean(tokens_per_expert) - tokens_per_expert[e])

        Args:
            tokens_per_expert: ``(E,)``, integer, routed slots of each expert in one optimizer step, summed over its
                micro-batches.

        Raises:
            ValueError: if the layer has no correction bias, or one of 16 bits.

        Source: DeepSeek-V3 (arXiv:2412.19437) section 2.1.2.
        """
        if self.score_correction_bias is None:
            raise ValueError("update_correction_bias needs score_correction_bias=True in the config, got False")
        if self.config.correction_bias_rule != "sign":
            raise ValueError(
                f"update_correction_bias needs correction_bias_rule='sign', got {self.config.correction_bias_rule!r}, "
                "which needs more than counts: make a StatsAccumulator and call its update"
            )
        bias = self.wide_correction_bias()
        if tokens_per_expert.shape != bias.shape:
            raise ValueError(
                f"tokens_per_expert must have shape {tuple(bias.shape)}, got {tuple(tokens_per_expert.shape)}"
            )
        # The sign of mean - count is computed in integers, because large counts are not exact in floating point.
        direction = (tokens_per_expert.sum() - tokens_per_expert * self.config.num_selectable_experts).sign()
        # Cast first, because torch multiplies integers in the default dtype.
        bias += self.config.correction_bias_update_rate * direction.to(bias.dtype)

    @torch.no_grad()
    def required_bias_histogram(self, routing: Routing) -> Tensor:
        """Count the biases that the tokens would require, ``(E, 1000)``; see `maxmoe.nn.required_bias_histogram`."""
        logits = routing.logits
        assert self.score_correction_bias is not None and logits is not None
        scores = logits.sigmoid() if self.config.score_function == "sigmoid" else logits.softmax(-1)
        bias, top_k = self.score_correction_bias, self.config.top_k
        return required_bias_histogram(scores, bias, top_k, token_mask=routing.token_mask)

    @torch.no_grad()
    def update_correction_bias_by_quantiles(self, histogram: Tensor) -> None:
        """Move the correction bias towards the one at which all experts would have had the same number of tokens.

        bias += rate * (balanced_bias(histogram, bias, top_k) - bias), for finite biases

        `histogram` is the sum of `required_bias_histogram` over the micro-batches of a step and over the ranks.
        """
        bias = self.wide_correction_bias()
        balanced = balanced_bias(histogram, bias, self.config.top_k)
        bias.copy_(bias.lerp(balanced, self.config.correction_bias_update_rate).where(bias.isfinite(), bias))


def make_router(config: MoEConfig, **options: Any) -> Router:
    """Create the router that a config describes; `options` as for `Router`."""
    made: Any = config.router_rule.make(config, **options)
    return Router(config, **options) if made is None else made


def select_experts(
    config: MoEConfig,
    logits: Tensor,
    correction_bias: Tensor | None,
    token_mask: Tensor | None,
    experts: Tensor | None,
    selected: Tensor | None = None,
) -> Routing:
    """Route tokens by their logits ``(T, E)``, with scored shared experts ``(T, E + n)``; else as `Router.forward`.

    `selected` has the experts ``(T, K)`` that the router has selected by ids.
    """
    if experts is not None:
        fixed = logits.detach()

        def choose() -> Tensor:
            return select_experts(config, fixed, correction_bias, None, None).experts if selected is None else selected

        experts = completed(experts, choose)
    is_unpadded, rule = experts is None, config.router_rule
    normalization, scale, of_shared = config.normalization, config.routed_scaling_factor, None
    if rule.scores_shared_experts:
        logits, of_shared = logits.tensor_split((config.num_selectable_experts,), 1)
    if rule.normalizes:
        normalization, scale = "none", 1.0
    if experts is None:
        experts = rule.select(config, logits.detach(), correction_bias) if selected is None else selected
    weights, selected, probabilities = route(
        logits,
        config.top_k,
        score_function=config.score_function,
        correction_bias=correction_bias,
        num_groups=config.num_groups,
        top_k_groups=config.top_k_groups,
        group_score=rule.group_score,
        normalization=normalization,
        scale=scale,
        experts=experts,
    )
    weights, shared_weights = rule.weigh(config, weights, of_shared)
    routing = Routing(logits, probabilities, weights, selected, is_unpadded=is_unpadded, shared_weights=shared_weights)
    return routing if token_mask is None else routing.without_padding(token_mask)


def _widen_correction_bias(router: Router, _keys: object) -> None:
    """Make the correction bias float32 after a state of 16 bits has been loaded with ``assign=True``."""
    bias = router.score_correction_bias
    if bias is not None:
        router.score_correction_bias = bias.to(torch.promote_types(bias.dtype, torch.float32))


def is_custom_router(router: nn.Module) -> bool:
    """Return whether a router, with or without adapters, has a forward of its own instead of `Router.forward`."""
    return type(router) is not Router and type(adapted_module(router)).forward is not Router.forward


def required_bias_histogram(
    scores: Tensor, correction_bias: Tensor, top_k: int, *, token_mask: Tensor | None = None
) -> Tensor:
    """Count, for each expert, the biases that the tokens would require to select it.

    required_bias[t, e] = cutoff[t] - scores[t, e]

    cutoff[t] is the (K+1)-th best of scores[t] + correction_bias. The bins are of equal width, from the smallest
    finite correction bias - 1 to the largest one + 1, which bound the required biases because scores are in [0, 1].

    Args:
        scores: ``(T, E)``, floating, scores in [0, 1].
        correction_bias: ``(E,)``, floating, correction bias by which the tokens are routed.
        top_k: K, experts per token, below E.
        token_mask: ``(T,)``, bool, False for padding; None for no padding.

    Returns:
        ``(E, 1000)``, float64, number of tokens in each bin.

    Source: Kimi K3 technical report, section 2.3.3 and appendix D.
    """
    num_tokens, num_experts = scores.shape
    biased = scores + correction_bias
    cutoff = biased.topk(top_k + 1, dim=1, sorted=True).values[:, -1:]
    low, width = _bins(correction_bias)
    bins = ((cutoff - scores - low) / width).long().clamp(0, NUM_BINS - 1)
    places = bins + NUM_BINS * torch.arange(num_experts, device=scores.device)
    counted = torch.ones(num_tokens, 1, dtype=torch.float64, device=scores.device)
    if token_mask is not None:
        counted = token_mask.unsqueeze(1).double()
    histogram = counted.new_zeros(num_experts * NUM_BINS)
    return histogram.scatter_add(0, places.flatten(), counted.expand_as(places).flatten()).view(num_experts, NUM_BINS)


def balanced_bias(histogram: Tensor, correction_bias: Tensor, top_k: int) -> Tensor:
    """Return the correction bias at which every expert would have been selected by K / E of the tokens.

    balanced_bias[e] = quantile of required_bias[:, e] at K / E, minus the mean over the experts

    The quantile is interpolated within its bin. Experts with an infinite bias, which all tokens or none select, keep
    it: the other experts share the slots that are left, and the mean is over them.

    Args:
        histogram: ``(E, 1000)``, float64, sum of `required_bias_histogram` over the tokens of an optimizer step.
        correction_bias: ``(E,)``, floating, correction bias of the step.
        top_k: K, experts per token.

    Returns:
        ``(E,)``, dtype of the correction bias; the correction bias itself if there are no tokens.
    """
    low, width = _bins(correction_bias.double())
    cumulative = histogram.cumsum(1)
    num_tokens = cumulative[:, -1:]
    is_finite = correction_bias.isfinite()
    num_finite = is_finite.sum().clamp_min(1).double()
    target = num_tokens * ((top_k - correction_bias.isposinf().sum()).clamp_min(0) / num_finite)
    bins = (cumulative < target).sum(1, keepdim=True).clamp_max(NUM_BINS - 1)
    in_bin = histogram.gather(1, bins)
    fraction = (target - cumulative.gather(1, bins) + in_bin) / in_bin.clamp_min(1)
    quantile = (low + width * (bins + fraction)).squeeze(1)
    balanced = quantile - quantile.where(is_finite, 0.0).sum() / num_finite
    return balanced.to(correction_bias.dtype).where((num_tokens[0] > 0) & is_finite, correction_bias)


def _bins(correction_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower end of the first bin and the width of all bins."""
    is_finite = correction_bias.isfinite()
    low, high = (
        correction_bias.where(is_finite, torch.inf).min() - 1,
        correction_bias.where(is_finite, -torch.inf).max() + 1,
    )
    return low, (high - low) / NUM_BINS
