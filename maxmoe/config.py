"""Configuration of a Mixture-of-Experts layer."""

import difflib
import functools
import inspect
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus", "identity"]
GroupScore = Literal["top2", "max"]
Normalization = Literal["none", "sum", "softmax"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swigluoai"]
WeightsTarget = Literal["output", "input"]
RouterKind = Literal["learned", "random"]
LoadBalanceScope = Literal["sequence", "batch"]
Implementation = Literal["sparse", "dense"]

FLOAT32_MAX = 2.0**128 - 2.0**104

Config = TypeVar("Config")


def refuse_unknown_fields(cls: type[Config]) -> type[Config]:
    """Decorate a dataclass so that an unknown keyword raises a TypeError with the most similar fields."""
    initialize, names = cls.__init__, inspect.signature(cls).parameters

    @functools.wraps(initialize)
    def checked(self: Config, *args: object, **values: object) -> None:
        for name in values:
            if name not in names:
                raise TypeError(f"{cls.__name__} has no field {name!r}{nearest(name, names)}")
        initialize(self, *args, **values)

    setattr(cls, "__init__", checked)  # noqa: B010, mypy refuses the assignment
    return cls


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes, routing, experts, losses and compute of a `maxmoe.MoE` layer.

    Args:
        hidden_size: D, width of the tokens.
        intermediate_size: F, width inside each expert.
        num_experts: E, routed experts.
        top_k: K, experts per token.
        score_function: function of the logits that gives the scores; "identity" for the logits themselves.
        router_bias: add a trained bias to the logits.
        score_correction_bias: add a bias to the scores for the selection only, updated by `MoE.update_correction_bias`.
        num_groups: number of groups of equal size that the experts form.
        top_k_groups: number of groups with the best scores from which the experts of a token are selected.
        group_score: score of a group: the sum of its two best scores, "top2", or its best score, "max".
        normalization: normalization of the K selected scores: "none", "sum" (divide by their sum) or "softmax". With
            top_k=1, "sum" and "softmax" make the weight constant, so that only auxiliary losses train the router; a
            warning is issued.
        routed_scaling_factor: factor of the routing weights.
        apply_weights_to: whether the routing weights scale the "output" or the "input" of the experts.
        router: "learned", or "random" (uniform and balanced, for tests and benchmarks).
        activation: activation function of routed and shared experts.
        gated: compute activation(gate) * up; otherwise activation(up).
        activation_limit: limit to which the gate is clipped from above and up on both sides; None for no clipping.
        expert_bias: add biases to the three projections of the routed experts.
        num_shared_experts: n, for one dense expert of width n * F that computes all tokens.
        shared_expert_gate: scale the output of the shared expert by sigmoid(x . w), as Qwen2-MoE does.
        load_balance_loss_weight: weight of the auxiliary balance loss, 0 for none.
        load_balance_scope: compute the balance loss per "sequence" or over the whole "batch".
        router_z_loss_weight: weight of mean(logsumexp(logits)^2), 0 for none.
        correction_bias_update_rate: step size of the loss-free balancing, 0 for none.
        implementation: "sparse" computes the routed rows, "dense" all experts with static shapes. With "sparse", the
            output of a token is bitwise independent of other tokens and of the number of threads. With "dense", which
            uses torch's matrix products, it is not.
        capacity_factor: with "dense" only: slots past int(max(ceil(S*K/E) * cf, cf)) per sequence and expert are
            dropped and counted. At most E, at which no slot is dropped.
        buffer_factor: with "sparse" only: at most int(T*K * factor) rows are computed, and further slots are dropped
            and counted. At most E.

    Raises:
        TypeError: for an unknown keyword, with the most similar fields.
        ValueError: for a value of another type or out of range, and for values that contradict each other, with both
            values.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int

    score_function: ScoreFunction = "softmax"
    router_bias: bool = False
    score_correction_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: GroupScore = "top2"
    normalization: Normalization = "sum"
    routed_scaling_factor: float = 1.0
    apply_weights_to: WeightsTarget = "output"
    router: RouterKind = "learned"

    activation: Activation = "silu"
    gated: bool = True
    activation_limit: float | None = None
    expert_bias: bool = False
    num_shared_experts: int = 0
    shared_expert_gate: bool = False

    load_balance_loss_weight: float = 0.0
    load_balance_scope: LoadBalanceScope = "sequence"
    router_z_loss_weight: float = 0.0
    correction_bias_update_rate: float = 0.0

    implementation: Implementation = "sparse"
    capacity_factor: float | None = None
    buffer_factor: float | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_choices()
        self._check_groups()
        self._check_experts()
        self._check_limits()
        self._warn_of_constant_weights()

    def _check_sizes(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_groups", "top_k_groups"):
            check_int(name, getattr(self, name), at_least=1)
        check_int("num_shared_experts", self.num_shared_experts, at_least=0)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k ({self.top_k}) must not exceed num_experts ({self.num_experts})")

    def _check_choices(self) -> None:
        choices = {
            "score_function": ScoreFunction,
            "group_score": GroupScore,
            "normalization": Normalization,
            "activation": Activation,
            "apply_weights_to": WeightsTarget,
            "router": RouterKind,
            "load_balance_scope": LoadBalanceScope,
            "implementation": Implementation,
        }
        for name, literal in choices.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in get_args(literal):
                raise ValueError(f"{name} must be one of {get_args(literal)}, got {value!r}")
        for name in ("router_bias", "score_correction_bias", "gated", "expert_bias", "shared_expert_gate"):
            check_bool(name, getattr(self, name))

    def _check_groups(self) -> None:
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_groups ({self.num_groups}) must divide num_experts ({self.num_experts})")
        if self.top_k_groups > self.num_groups:
            raise ValueError(f"top_k_groups ({self.top_k_groups}) must not exceed num_groups ({self.num_groups})")
        reachable = self.num_experts // self.num_groups * self.top_k_groups
        if self.top_k > reachable:
            raise ValueError(
                f"top_k ({self.top_k}) must not exceed the {reachable} experts of "
                f"top_k_groups ({self.top_k_groups}) groups"
            )

    def _check_experts(self) -> None:
        if self.activation == "swigluoai" and not self.gated:
            raise ValueError("activation 'swigluoai' needs gated=True, got gated=False")
        if self.activation_limit is not None:
            check_number("activation_limit", self.activation_limit, above=0)
            if not self.gated:
                raise ValueError(f"activation_limit ({self.activation_limit}) needs gated=True, got gated=False")
        if self.shared_expert_gate and self.num_shared_experts == 0:
            raise ValueError("shared_expert_gate=True needs num_shared_experts >= 1, got 0")

    def _check_limits(self) -> None:
        check_number("routed_scaling_factor", self.routed_scaling_factor, above=0)
        for name in ("load_balance_loss_weight", "router_z_loss_weight", "correction_bias_update_rate"):
            check_number(name, getattr(self, name), at_least=0)
        if self.correction_bias_update_rate and not self.score_correction_bias:
            raise ValueError(
                f"correction_bias_update_rate ({self.correction_bias_update_rate}) needs "
                f"score_correction_bias=True, got False"
            )
        for name, implementation in (("capacity_factor", "dense"), ("buffer_factor", "sparse")):
            value = getattr(self, name)
            if value is None:
                continue
            check_number(name, value, above=0)
            if value > self.num_experts:
                raise ValueError(
                    f"{name} ({value}) must not exceed num_experts ({self.num_experts}), which leaves out no slot"
                )
            if self.implementation != implementation:
                raise ValueError(
                    f"{name} ({value}) needs implementation={implementation!r}, got {self.implementation!r}"
                )

    def _warn_of_constant_weights(self) -> None:
        # No warning with one expert, for which there is nothing to route, or with the random router.
        if self.top_k == 1 < self.num_experts and self.normalization != "none" and self.router == "learned":
            warnings.warn(
                f"top_k=1 with normalization={self.normalization!r} makes every routing weight constant, so that the "
                "router gets no gradient from the output of the layer: set normalization='none'",
                stacklevel=1,  # attributed to this line, so that Python shows the warning once for all configs
            )


def check_int(name: str, value: object, *, at_least: int) -> None:
    """Raise unless `value` is an int, not a bool, in [at_least, 2^31)."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        kind = "a positive int" if at_least == 1 else f"an int >= {at_least}"
        raise ValueError(f"{name} must be {kind}, got {value!r}")
    if value >= 2**31:
        raise ValueError(f"{name} must be an int below 2^31, got {value}")


def check_number(name: str, value: object, *, above: float = -math.inf, at_least: float = -math.inf) -> None:
    """Raise unless `value` is an int or float that is finite in float32 and within the bounds."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (number > above and at_least <= number <= FLOAT32_MAX):
        bound = f"> {above}" if above > at_least else f">= {at_least}"
        raise ValueError(f"{name} must be a finite float {bound}, got {value!r}")


def check_bool(name: str, value: object) -> None:
    """Raise unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message that lists the known names most similar to `name`, or all of them."""
    known = sorted(set(known))
    alike = difflib.get_close_matches(name, known, n=3)
    if alike:
        return f"; the nearest are {', '.join(map(repr, alike))}"
    return f"; there are {', '.join(map(repr, known)) or 'none'}"
