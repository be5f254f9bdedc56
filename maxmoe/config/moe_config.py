"""Configuration of a Mixture-of-Experts layer."""

import warnings
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, get_args, get_origin

from maxmoe.checks.fields import check_bool, check_choice, check_int, check_number, refuse_unknown_fields
from maxmoe.config.components import (
    PLAIN,
    Activation,
    ActivationRule,
    Component,
    ExpertNorms,
    RouterRule,
    ZeroComputation,
)

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus", "identity"]
Normalization = Literal["none", "sum", "softmax"]
LimitTarget = Literal["input", "output"]
WeightsTarget = Literal["output", "input"]
RouterKind = Literal["learned", "random"]
LoadBalanceScope = Literal["sequence", "batch", "step"]
CorrectionBiasRule = Literal["sign", "quantile"]
Implementation = Literal["sparse", "dense"]
Overflow = Literal["drop", "chunks"]

_NO_NORMS = ExpertNorms()
# Fields of earlier versions: the value with no effect, and where another value is now.
_MOVED: dict[str, tuple[object, str]] = {
    "latent_in_norm": (False, "expert_norms=ExpertNorms(latent_in=True)"),
    "latent_out_norm": (False, "expert_norms=ExpertNorms(latent_out=True)"),
    "expert_norm": (False, "expert_norms=ExpertNorms(output=True)"),
    "norm_eps": (1e-5, "expert_norms=ExpertNorms(eps=...)"),
    "expert_norm_eps": (1e-8, "expert_norms=ExpertNorms(output_eps=...)"),
    "num_zero_experts": (0, "zero_computation=ZeroComputation(zero=...)"),
    "num_copy_experts": (0, "zero_computation=ZeroComputation(copy=...)"),
    "num_constant_experts": (0, "zero_computation=ZeroComputation(constant=...)"),
    "logit_scale": (1.0, "router=ScaledLogits(scale=...)"),
    "router_scale": (False, "router=SharedExpertScores(scale=True)"),
    "shared_expert_scores": (False, "router=SharedExpertScores()"),
    "router_hidden_size": (None, "router=RouterMLP(hidden_size=...)"),
    "router_takes_state": (False, "router=RouterMLP(takes_state=True)"),
    "group_score": ("top2", "router=Selection(group_score='max')"),
    "other_groups": ("excluded", "router=Selection(other_groups='zero')"),
    "selection": ("scores", "router=Selection(by='logits')"),
    "activation_limit_target": ("input", "activation=LimitedOutput(...)"),
    "shared_activation_limit": ("same", "activation=LimitedOutput(shared_limit=...)"),
    "gate_softcap": (None, "activation=SiTU(gate_softcap=...)"),
    "up_softcap": (None, "activation=SiTU(up_softcap=...)"),
}


@partial(refuse_unknown_fields, moved=_MOVED)
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
        zero_computation: further experts that the router selects from and that compute no matrix product, as in
            LongCat-Flash and MoE++; see `maxmoe.ZeroComputation`.
        expert_norms: norms around the routed experts, as in Muse Spark and Kimi K3; see `maxmoe.ExpertNorms`.
        score_function: function of the logits that gives the scores; "identity" for the logits themselves.
        router_bias: add a trained bias to the logits.
        score_correction_bias: add a bias to the scores for the selection only, updated after each optimizer step by
            `StatsAccumulator.update` or `MoE.update_correction_bias`.
        num_groups: number of groups of equal size that the experts form; 1 with zero, copy or constant experts.
        top_k_groups: number of groups with the best scores from which the experts of a token are selected.
        normalization: normalization of the K selected scores: "none", "sum" (divide by their sum) or "softmax". With
            top_k=1, "sum" and "softmax" make the weight constant, so that only auxiliary losses train the router; a
            warning is issued.
        routed_scaling_factor: factor of the routing weights.
        apply_weights_to: whether the routing weights scale the "output" or the "input" of the experts.
        router: "learned"; "random" (uniform and balanced, for tests and benchmarks); or the rule of a family, such as
            `maxmoe.nn.Selection`.
        activation: activation function of routed and shared experts, a name or a rule with numbers of its own, such as
            `maxmoe.SiTU`. See `maxmoe.ops.expert_ffn` for the formula of "swigluoai", which takes a gate.
        gated: compute activation(gate) * up; otherwise activation(up).
        activation_limit: limit to which the gate is clipped from above and up on both sides, before the activation;
            None for no clipping.
        expert_bias: add biases to the three projections of the routed experts.
        num_shared_experts: n, for one dense expert of width n * F that computes all tokens.
        shared_expert_gate: scale the output of the shared expert by sigmoid(x . w), as Qwen2-MoE does.
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
        buffer_factor: with "sparse" only: at most int(T*K * factor) rows are computed at a time; `overflow` says what
            happens with further ones. At most E. With zero, copy and constant experts, the bound is the part of it for
            experts that compute rows. On a mesh, it is a multiple of the mean over the ranks.
        overflow: with `buffer_factor` only: further slots are dropped and counted ("drop"), or their rows are computed
            in "chunks" that fit, one after the other, and recomputed in the backward, so that nothing is dropped and
            the step needs the memory of one buffer.

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
    zero_computation: ZeroComputation | None = None
    expert_norms: ExpertNorms | None = None

    score_function: ScoreFunction = "softmax"
    router_bias: bool = False
    score_correction_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    normalization: Normalization = "sum"
    routed_scaling_factor: float = 1.0
    apply_weights_to: WeightsTarget = "output"
    router: RouterKind | RouterRule = "learned"

    activation: Activation | ActivationRule = "silu"
    gated: bool = True
    activation_limit: float | None = None
    expert_bias: bool = False
    num_shared_experts: int = 0
    shared_expert_gate: bool = False

    load_balance_loss_weight: float = 0.0
    load_balance_scope: LoadBalanceScope = "sequence"
    router_z_loss_weight: float = 0.0
    correction_bias_rule: CorrectionBiasRule = "sign"
    correction_bias_update_rate: float = 0.0

    implementation: Implementation = "sparse"
    capacity_factor: float | None = None
    buffer_factor: float | None = None
    overflow: Overflow = "drop"

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_sizes()
        self._check_groups()
        self._check_activation()
        self._check_limits()
        self._check_balancing()
        for part in self._components():
            part.check(self)
        self._warn_of_constant_weights()

    @property
    def row_size(self) -> int:
        """Width of the rows that the routed experts read and write."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def norms(self) -> ExpertNorms:
        """Norms around the routed experts, all False by default."""
        return self.expert_norms or _NO_NORMS

    @property
    def maps_rows(self) -> bool:
        """Whether parts that every process computes whole lie before or after the routed experts: maps and norms."""
        return self.latent_size is not None or self.norms.input or self.norms.sum

    @property
    def num_selectable_experts(self) -> int:
        """Number of experts that the router selects from: those that compute, then zero, copy and constant experts.

        Expert ids are in this order.
        """
        return self.num_experts + (0 if self.zero_computation is None else self.zero_computation.count)

    @property
    def router_rule(self) -> RouterRule:
        """Rule of the router; one that changes nothing unless `router` has another one."""
        return self.router if isinstance(self.router, RouterRule) else PLAIN

    @property
    def activation_arguments(self) -> dict[str, Any]:
        """Arguments of `maxmoe.ops.expert_ffn` for the activation, in the order of its signature."""
        return self._activation_arguments(of_shared=False)

    @property
    def shared_activation_arguments(self) -> dict[str, Any]:
        """As `activation_arguments`, for the shared experts."""
        return self._activation_arguments(of_shared=True)

    def _activation_arguments(self, *, of_shared: bool) -> dict[str, Any]:
        given: dict[str, Any] = {"activation": self.activation, "limit": self.activation_limit}
        if isinstance(self.activation, ActivationRule):
            given = self.activation.arguments(self, of_shared=of_shared)
        defaults = {"activation": "", "limit": None, "limit_target": "input", "gate_softcap": None, "up_softcap": None}
        return defaults | given

    @property
    def may_drop(self) -> bool:
        """Whether a capacity or a buffer may drop slots."""
        has_bound = self.buffer_factor is not None and self.overflow == "drop"
        return has_bound or self.capacity_factor is not None

    @property
    def has_zero_computation_outputs(self) -> bool:
        """Whether there are experts that compute no matrix product and whose output is not zero."""
        return self.zero_computation is not None and self.zero_computation.has_outputs

    def num_balanced_rows(self, num_slots: int) -> int:
        """Return how many of `num_slots` slots the experts compute if every selectable expert gets equally many."""
        return num_slots * self.num_experts // self.num_selectable_experts

    def require(self, reason: str, **wanted: object) -> None:
        """Raise a ValueError unless fields have the wanted values, which `reason` needs."""
        for name, value in wanted.items():
            if (got := getattr(self, name)) != value:
                raise ValueError(f"{reason} needs {name}={value!r}, got {got!r}")

    def require_shared_experts(self, reason: str) -> None:
        """Raise a ValueError without shared experts, which `reason` needs."""
        if self.num_shared_experts == 0:
            raise ValueError(f"{reason} needs num_shared_experts >= 1, got 0")

    def _components(self) -> list[Component]:
        """Return the components of the config; components of a saved config, which are dicts, are made first."""
        # Each field has a component, or a value of another type.
        kinds: dict[str, tuple[type[Component], type]] = {
            "zero_computation": (ZeroComputation, type(None)),
            "expert_norms": (ExpertNorms, type(None)),
            "router": (RouterRule, str),
            "activation": (ActivationRule, str),
        }
        found = []
        for name, (kind, other) in kinds.items():
            value = getattr(self, name)
            if isinstance(value, other):
                continue
            found.append(kind.of(name, value))
            object.__setattr__(self, name, found[-1])
        return found

    def _check_choices(self) -> None:
        self._components()
        for each in fields(self):
            value, choices = getattr(self, each.name), get_args(each.type)
            if each.type is bool:
                check_bool(each.name, value)
                continue
            if each.name in ("router", "activation"):  # a name or a component
                if not isinstance(value, str):
                    continue
                choices = get_args(choices[0])
            elif get_origin(each.type) is not Literal:
                continue
            check_choice(each.name, value, choices)

    def _check_sizes(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_groups", "top_k_groups"):
            check_int(name, getattr(self, name), at_least=1)
        check_int("num_shared_experts", self.num_shared_experts, at_least=0)
        if self.latent_size is not None:
            check_int("latent_size", self.latent_size, at_least=1)
        if self.top_k > self.num_selectable_experts:
            raise ValueError(f"top_k ({self.top_k}) must not exceed {self._selectable}")

    @property
    def _selectable(self) -> str:
        """The number of experts that the router selects from, for messages, with what adds up to it."""
        others = "" if self.zero_computation is None else f" + {self.zero_computation}"
        return f"num_experts ({self.num_experts}){others}"

    def _check_groups(self) -> None:
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
        if self.activation == "situ":
            raise ValueError("activation 'situ' must have softcaps: give maxmoe.SiTU(gate_softcap=..., up_softcap=...)")
        if self.activation == "swigluoai":
            self.require("activation='swigluoai'", gated=True)
        if self.activation_limit is not None:
            check_number("activation_limit", self.activation_limit, above=0)
            self.require(f"activation_limit ({self.activation_limit})", gated=True)
        if self.shared_expert_gate:
            self.require_shared_experts("shared_expert_gate=True")

    def _check_limits(self) -> None:
        check_number("routed_scaling_factor", self.routed_scaling_factor, above=0)
        for name in ("load_balance_loss_weight", "router_z_loss_weight", "correction_bias_update_rate"):
            check_number(name, getattr(self, name), at_least=0)
        for name, implementation in (("capacity_factor", "dense"), ("buffer_factor", "sparse")):
            value = getattr(self, name)
            if value is None:
                continue
            check_number(name, value, above=0)
            if value > self.num_selectable_experts:
                raise ValueError(f"{name} ({value}) must not exceed {self._selectable}, which leaves out no slot")
            self.require(f"{name} ({value})", implementation=implementation)
        if self.overflow == "chunks" and self.buffer_factor is None:
            raise ValueError("overflow='chunks' needs a buffer_factor, got None")

    def _check_balancing(self) -> None:
        if self.correction_bias_update_rate:
            rate = f"correction_bias_update_rate ({self.correction_bias_update_rate})"
            self.require(rate, score_correction_bias=True)
        if self.correction_bias_rule != "quantile":
            return
        rule = "correction_bias_rule='quantile'"
        self.require(rule, score_correction_bias=True, num_groups=1)
        if not self.router_rule.selects_by_scores:
            raise ValueError(f"{rule} needs a router that selects by scores, got router={self.router}")
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

    def _warn_of_constant_weights(self) -> None:
        # No warning with one expert, for which there is nothing to route, or with the random router.
        is_constant = self.normalization != "none" and not self.router_rule.scores_shared_experts
        if self.top_k == 1 < self.num_selectable_experts and is_constant and self.router != "random":
            warnings.warn(
                f"top_k=1 with normalization={self.normalization!r} makes every routing weight constant, so that the "
                "router gets no gradient from the output of the layer: set normalization='none'",
                stacklevel=1,  # attributed to this line, so that Python shows the warning once for all configs
            )
