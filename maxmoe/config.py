"""Configuration of a Mixture-of-Experts layer."""

import warnings
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from maxmoe.checks.fields import check_bool, check_int, check_number, refuse_unknown_fields

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus", "identity"]
GroupScore = Literal["top2", "max"]
Selection = Literal["scores", "logits"]
OtherGroups = Literal["excluded", "zero"]
Normalization = Literal["none", "sum", "softmax"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swigluoai", "situ"]
LimitTarget = Literal["input", "output"]
WeightsTarget = Literal["output", "input"]
RouterKind = Literal["learned", "random"]
LoadBalanceScope = Literal["sequence", "batch", "step"]
CorrectionBiasRule = Literal["sign", "quantile"]
Implementation = Literal["sparse", "dense"]

NEED_GATE: tuple[Activation, ...] = ("swigluoai", "situ")  # activations that also apply a function to up


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes, routing, experts, losses and compute of a `maxmoe.MoE` layer.

    Args:
        hidden_size: D, width of the tokens.
        intermediate_size: F, width inside each expert.
        num_experts: E, routed experts.
        top_k: K, experts per token.
        latent_size: width of the rows that the routed experts read and write, between two projections that they share,
            as in Nemotron 3; None for hidden_size, without projections. Router, shared, copy and constant experts take
            the tokens themselves.
        latent_in_norm: normalize the rows after the projection in, as in Muse Spark; see `maxmoe.nn.LatentNorm`.
        latent_out_norm: normalize the sum over the experts before the projection out, as in Kimi K3.
        num_zero_experts: further experts that the router selects from, whose output is zero. See
            `maxmoe.nn.ZeroComputationExperts`.
        num_copy_experts: further experts whose output is their input, as in LongCat-Flash and MoE++.
        num_constant_experts: further experts whose output is a mixture of their input and a trained vector, as in
            MoE++.
        score_function: function of the logits that gives the scores; "identity" for the logits themselves.
        router_bias: add a trained bias to the logits.
        logit_scale: factor of the logits.
        router_scale: multiply the routing weights by a trained number.
        router_hidden_size: R, width of a router with hidden layers, as in ZAYA, whose state of this width the layer
            returns for the next layer; None for a linear router. See `maxmoe.nn.RouterMLP`.
        router_takes_state: add the state of the layer before, the argument `router_state`, to the state of the router.
        score_correction_bias: add a bias to the scores for the selection only, updated after each optimizer step by
            `StatsAccumulator.update` or `MoE.update_correction_bias`.
        num_groups: number of groups of equal size that the experts form; 1 with zero, copy or constant experts.
        top_k_groups: number of groups with the best scores from which the experts of a token are selected.
        group_score: score of a group: the sum of its two best scores, "top2", or its best score, "max".
        other_groups: what becomes of the experts of all other groups: they are "excluded", or selected with a score of
            "zero", bias included, if fewer than K experts of the best groups have a higher one, as in A.X-K2.
        selection: whether experts are selected by their "scores" or by their "logits", as in Kolibri; the correction
            bias is added to either.
        normalization: normalization of the K selected scores: "none", "sum" (divide by their sum) or "softmax". With
            top_k=1, "sum" and "softmax" make the weight constant, so that only auxiliary losses train the router; a
            warning is issued.
        routed_scaling_factor: factor of the routing weights.
        apply_weights_to: whether the routing weights scale the "output" or the "input" of the experts.
        router: "learned", or "random" (uniform and balanced, for tests and benchmarks).
        activation: activation function of routed and shared experts. See `maxmoe.ops.expert_ffn` for the formulas of
            "swigluoai" and "situ", which take a gate.
        gated: compute activation(gate) * up; otherwise activation(up).
        activation_limit: limit to which the gate is clipped from above and up on both sides; None for no clipping.
        activation_limit_target: clip the "input" of the activation function, the gate, as DeepSeek-V4 does, or its
            "output", as Step-3.7 does.
        shared_activation_limit: limit of the shared experts: the "same", another one, or None for no clipping.
        gate_softcap: with activation "situ" only, which needs it: bound of the linear factor of the gate.
        up_softcap: with activation "situ" only, which needs it: bound of up.
        expert_bias: add biases to the three projections of the routed experts.
        expert_norm: normalize the output of each expert before it is weighted, as in Muse Spark; all share the norm.
        norm_eps: epsilon of the latent norms, and of the norm of a router with hidden layers.
        expert_norm_eps: epsilon of the norm of the outputs.
        num_shared_experts: n, for one dense expert of width n * F that computes all tokens.
        shared_expert_gate: scale the output of the shared expert by sigmoid(x . w), as Qwen2-MoE does.
        shared_expert_scores: make n shared experts of width F, which further rows of the router score. Their weights
            are normalized together with the weights of the selected experts, as in Inkling.
        load_balance_loss_weight: weight of the auxiliary balance loss, 0 for none.
        load_balance_scope: compute the balance loss per "sequence", over the whole "batch", or with the load of the
            optimizer "step" so far, which `maxmoe.StatsAccumulator` counts.
        router_z_loss_weight: weight of mean(logsumexp(logits)^2), 0 for none.
        correction_bias_rule: loss-free balancing by a step of fixed size with the "sign" of mean load - load, or by a
            step to the bias that balances the tokens of the last step, a "quantile" of what they require.
        correction_bias_update_rate: step size of the loss-free balancing, 0 for none; with "quantile" the fraction of
            the way to the balanced bias, at most 1.
        implementation: "sparse" computes the routed rows, "dense" all experts with static shapes. With "sparse", the
            output of a token is bitwise independent of other tokens and of the number of threads. With "dense", which
            uses torch's matrix products, it is not.
        capacity_factor: with "dense" only: slots past int(max(ceil(S*K/E) * cf, cf)) per sequence and expert are
            dropped and counted. At most E, at which no slot is dropped. E counts zero, copy and constant experts here,
            which drop no slot.
        buffer_factor: with "sparse" only: at most int(T*K * factor) rows are computed, and further slots are dropped
            and counted. At most E. With zero, copy and constant experts, the bound is the part of it for experts that
            compute rows.

    Raises:
        TypeError: for an unknown keyword, with the most similar fields.
        ValueError: for a value of another type or out of range, and for values that contradict each other, with both
            values.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    latent_size: int | None = None
    latent_in_norm: bool = False
    latent_out_norm: bool = False
    num_zero_experts: int = 0
    num_copy_experts: int = 0
    num_constant_experts: int = 0

    score_function: ScoreFunction = "softmax"
    router_bias: bool = False
    logit_scale: float = 1.0
    router_scale: bool = False
    router_hidden_size: int | None = None
    router_takes_state: bool = False
    score_correction_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: GroupScore = "top2"
    other_groups: OtherGroups = "excluded"
    selection: Selection = "scores"
    normalization: Normalization = "sum"
    routed_scaling_factor: float = 1.0
    apply_weights_to: WeightsTarget = "output"
    router: RouterKind = "learned"

    activation: Activation = "silu"
    gated: bool = True
    activation_limit: float | None = None
    activation_limit_target: LimitTarget = "input"
    shared_activation_limit: float | Literal["same"] | None = "same"
    gate_softcap: float | None = None
    up_softcap: float | None = None
    expert_bias: bool = False
    expert_norm: bool = False
    norm_eps: float = 1e-5
    expert_norm_eps: float = 1e-8
    num_shared_experts: int = 0
    shared_expert_gate: bool = False
    shared_expert_scores: bool = False

    load_balance_loss_weight: float = 0.0
    load_balance_scope: LoadBalanceScope = "sequence"
    router_z_loss_weight: float = 0.0
    correction_bias_rule: CorrectionBiasRule = "sign"
    correction_bias_update_rate: float = 0.0

    implementation: Implementation = "sparse"
    capacity_factor: float | None = None
    buffer_factor: float | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_choices()
        self._check_groups()
        self._check_activation()
        self._check_experts()
        self._check_limits()
        self._check_balancing()
        self._warn_of_constant_weights()

    @property
    def row_size(self) -> int:
        """Width of the rows that the routed experts read and write."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def num_selectable_experts(self) -> int:
        """Number of experts that the router selects from: those that compute, then zero, copy and constant experts.

        Expert ids are in this order.
        """
        return self.num_experts + self.num_zero_experts + self.num_copy_experts + self.num_constant_experts

    @property
    def scores_other_groups(self) -> bool:
        """Whether experts outside of the best groups are selected as well, with a score of zero."""
        return self.other_groups == "zero" and self.top_k_groups < self.num_groups

    @property
    def activation_arguments(self) -> dict[str, Any]:
        """Arguments of `maxmoe.ops.expert_ffn` for the activation, in the order of its signature."""
        return self._activation_arguments(self.activation_limit)

    @property
    def shared_activation_arguments(self) -> dict[str, Any]:
        """As `activation_arguments`, for the shared experts."""
        limit = self.shared_activation_limit
        return self._activation_arguments(self.activation_limit if limit == "same" else limit)

    def _activation_arguments(self, limit: float | None) -> dict[str, Any]:
        return {
            "activation": self.activation,
            "limit": limit,
            "limit_target": "input" if limit is None else self.activation_limit_target,
            "gate_softcap": self.gate_softcap,
            "up_softcap": self.up_softcap,
        }

    @property
    def has_zero_computation_outputs(self) -> bool:
        """Whether there are experts that compute no matrix product and whose output is not zero."""
        return self.num_copy_experts + self.num_constant_experts > 0

    def num_balanced_rows(self, num_slots: int) -> int:
        """Return how many of `num_slots` slots the experts compute if every selectable expert gets equally many."""
        return num_slots * self.num_experts // self.num_selectable_experts

    def _check_sizes(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_groups", "top_k_groups"):
            check_int(name, getattr(self, name), at_least=1)
        for name in ("num_zero_experts", "num_copy_experts", "num_constant_experts", "num_shared_experts"):
            check_int(name, getattr(self, name), at_least=0)
        for name in ("latent_size", "router_hidden_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1)
        if self.top_k > self.num_selectable_experts:
            raise ValueError(f"top_k ({self.top_k}) must not exceed {self._selectable}")

    def _check_choices(self) -> None:
        for each in fields(self):
            value, choices = getattr(self, each.name), get_args(each.type)
            if each.type is bool:
                check_bool(each.name, value)
            elif get_origin(each.type) is Literal and (not isinstance(value, str) or value not in choices):
                raise ValueError(f"{each.name} must be one of {choices}, got {value!r}")

    @property
    def _selectable(self) -> str:
        """The number of experts that the router selects from, for messages, with the fields that add up to it."""
        names = ("num_experts", "num_zero_experts", "num_copy_experts", "num_constant_experts")
        return " + ".join(f"{name} ({getattr(self, name)})" for name in names if getattr(self, name))

    def _check_groups(self) -> None:
        if self.num_groups > 1 and self.num_selectable_experts > self.num_experts:
            raise ValueError(f"num_groups ({self.num_groups}) must be 1 with {self._selectable}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_groups ({self.num_groups}) must divide num_experts ({self.num_experts})")
        if self.top_k_groups > self.num_groups:
            raise ValueError(f"top_k_groups ({self.top_k_groups}) must not exceed num_groups ({self.num_groups})")
        reachable = self.num_selectable_experts // self.num_groups * self.top_k_groups
        if self.top_k > reachable:
            raise ValueError(
                f"top_k ({self.top_k}) must not exceed the {reachable} experts of "
                f"top_k_groups ({self.top_k_groups}) groups"
            )

    def _check_activation(self) -> None:
        if self.activation in NEED_GATE:
            self._require(f"activation={self.activation!r}", gated=True)
        for name, no_limit in (("activation_limit", None), ("shared_activation_limit", "same")):
            limit = getattr(self, name)
            if limit is None or (isinstance(limit, str) and limit == no_limit):
                continue
            check_number(name, limit, above=0)
            self._require(f"{name} ({limit})", gated=True)
            if self.activation == "situ":  # which has softcaps
                self._require("activation='situ'", **{name: no_limit})
        if self.shared_activation_limit != "same" and self.num_shared_experts == 0:
            raise ValueError(
                f"shared_activation_limit ({self.shared_activation_limit}) needs num_shared_experts >= 1, got 0"
            )
        for name in ("gate_softcap", "up_softcap"):
            softcap = getattr(self, name)
            if softcap is not None:
                check_number(name, softcap, above=0)
            if (softcap is not None) != (self.activation == "situ"):
                needed = "a number" if self.activation == "situ" else "None"
                raise ValueError(f"{name} must be {needed} with activation {self.activation!r}, got {softcap}")

    def _check_experts(self) -> None:
        for name in ("latent_in_norm", "latent_out_norm"):
            if getattr(self, name) and self.latent_size is None:
                raise ValueError(f"{name}=True needs a latent_size, got None")
        if self.router_takes_state and self.router_hidden_size is None:
            raise ValueError("router_takes_state=True needs a router_hidden_size, got None")
        for name in ("shared_expert_gate", "shared_expert_scores"):
            if getattr(self, name) and self.num_shared_experts == 0:
                raise ValueError(f"{name}=True needs num_shared_experts >= 1, got 0")
        if self.expert_norm:
            self._require("expert_norm=True", apply_weights_to="output")
        if self.num_constant_experts:
            self._require(f"num_constant_experts ({self.num_constant_experts})", apply_weights_to="output")
        if self.shared_expert_scores:
            self._require(
                "shared_expert_scores=True",
                score_function="sigmoid",
                normalization="sum",
                apply_weights_to="output",
                shared_expert_gate=False,
            )

    def _check_limits(self) -> None:
        for name in ("logit_scale", "routed_scaling_factor", "norm_eps", "expert_norm_eps"):
            check_number(name, getattr(self, name), above=0)
        for name in ("load_balance_loss_weight", "router_z_loss_weight", "correction_bias_update_rate"):
            check_number(name, getattr(self, name), at_least=0)
        for name, implementation in (("capacity_factor", "dense"), ("buffer_factor", "sparse")):
            value = getattr(self, name)
            if value is None:
                continue
            check_number(name, value, above=0)
            if value > self.num_selectable_experts:
                raise ValueError(f"{name} ({value}) must not exceed {self._selectable}, which leaves out no slot")
            self._require(f"{name} ({value})", implementation=implementation)

    def _check_balancing(self) -> None:
        if self.correction_bias_update_rate:
            rate = f"correction_bias_update_rate ({self.correction_bias_update_rate})"
            self._require(rate, score_correction_bias=True)
        if self.correction_bias_rule != "quantile":
            return
        rule = "correction_bias_rule='quantile'"
        self._require(rule, score_correction_bias=True, num_groups=1, selection="scores")
        if self.score_function not in ("sigmoid", "softmax"):
            raise ValueError(
                f"{rule} needs scores in [0, 1], score_function='sigmoid' or 'softmax', got {self.score_function!r}"
            )
        if self.top_k == self.num_selectable_experts:
            raise ValueError(
                f"{rule} needs top_k ({self.top_k}) below the number of experts ({self.num_selectable_experts})"
            )
        if self.correction_bias_update_rate > 1:
            raise ValueError(f"{rule} needs correction_bias_update_rate <= 1, got {self.correction_bias_update_rate}")

    def _require(self, reason: str, **wanted: object) -> None:
        """Raise unless fields have the wanted values, which `reason` needs."""
        for name, value in wanted.items():
            if (got := getattr(self, name)) != value:
                raise ValueError(f"{reason} needs {name}={value!r}, got {got!r}")

    def _warn_of_constant_weights(self) -> None:
        # No warning with one expert, for which there is nothing to route, or with the random router.
        is_constant = self.normalization != "none" and not self.shared_expert_scores
        if self.top_k == 1 < self.num_selectable_experts and is_constant and self.router == "learned":
            warnings.warn(
                f"top_k=1 with normalization={self.normalization!r} makes every routing weight constant, so that the "
                "router gets no gradient from the output of the layer: set normalization='none'",
                stacklevel=1,  # attributed to this line, so that Python shows the warning once for all configs
            )
