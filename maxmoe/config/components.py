"""Components of a `MoEConfig`: rules that few families have, each with its own numbers, saved with the config.

A component is a frozen dataclass. `dataclasses.asdict` of a config turns it into a dict with its class as "kind", and
`MoEConfig` makes it again from such a dict, so that a config is saved as JSON.
"""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

from torch import Tensor, nn
from typing_extensions import dataclass_transform

from maxmoe.checks.fields import check_bool, check_int, check_number, nearest, refuse_unknown_fields

if TYPE_CHECKING:
    from maxmoe.config.moe_config import MoEConfig

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swigluoai", "situ"]
GroupScore = Literal["top2", "max"]
RouterIds = Literal["tokens", "documents"]

_KINDS: dict[str, type["Component"]] = {}

C = TypeVar("C", bound="Component")


class Component:
    """Base of the components; each is decorated with `component`."""

    kind: str

    def check(self, config: "MoEConfig") -> None:
        """Raise a ValueError if the component contradicts other fields of its config."""

    @classmethod
    def of(cls: type[C], name: str, value: object) -> C:
        """Return the value of the field `name` of a config, a component or the dict of a saved one.

        Raises a ValueError if it is neither, or of another class.
        """
        if isinstance(value, Mapping):
            fields = dict(value)
            kind = fields.pop("kind", None)
            known = {each.__name__: each for each in kinds(Component)}
            if kind not in known:
                raise ValueError(f"{name} must have the kind of a component, got {kind!r}{nearest(str(kind), known)}")
            value = known[kind](**fields)
        if not isinstance(value, cls):
            names = ", ".join(each.__name__ for each in kinds(cls))
            raise ValueError(f"{name} must be one of {names}, got {value!r}")
        return value


def kinds(base: type[C]) -> list[type[C]]:
    """Return the components of a kind, by name, with the components of all families."""
    importlib.import_module("maxmoe.families.family").families()  # each registers its components
    return [kind for _, kind in sorted(_KINDS.items()) if issubclass(kind, base)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def component(cls: type[C]) -> type[C]:
    """Decorate a class of components: make it a frozen dataclass, and let saved configs find it by its name."""
    cls.__annotations__ = {"kind": str, **inspect.get_annotations(cls)}
    cls.kind = field(default=cls.__name__, init=False, repr=False)
    _KINDS[cls.__name__] = refuse_unknown_fields(dataclass(frozen=True, kw_only=True)(cls))
    return cls


class Scored(NamedTuple):
    """What a router of the specification has scored."""

    weights: Tensor  # (T, K), of `maxmoe.reference.route`
    experts: Tensor  # (T, K)
    of_shared: Tensor  # (T, n), logits of shared experts, none without `RouterRule.scores_shared_experts`


Weighed: TypeAlias = tuple[Tensor, Tensor | None]  # weights of the selected and of the shared experts


class RouterRule(Component):
    """How the router of a family differs from `maxmoe.nn.Router`; the base class changes nothing.

    A rule overrides the methods that it changes. For each there is a specification in plain loops, `reference_...`,
    which `maxmoe.reference.moe` calls. Sizes: T tokens, E selectable experts, K experts per token.
    """

    # Score of a group of experts: the sum of its two best scores, "top2", or its best score, "max".
    group_score: GroupScore = "top2"
    takes_state: bool = False  # whether the router takes the state of the layer before
    scores_shared_experts: ClassVar[bool] = False  # by further logits, whose weights the shared experts get
    weighs_shared_experts: ClassVar[bool] = False  # by `weigh`
    normalizes: ClassVar[bool] = False  # whether `weigh` normalizes and scales the scores
    takes_ids: ClassVar[RouterIds | None] = None  # whose ids the router takes, in the argument `router_inputs`
    num_ids: int | None = None  # ids are in [0, num_ids); None for any integers

    @property
    def selects_by_scores(self) -> bool:
        """Whether experts are selected by the scores of the score function."""
        return True

    @property
    def state_size(self) -> int | None:
        """R, width of a state that goes from layer to layer; None for a router without one."""
        return None

    def is_plain(self, config: "MoEConfig") -> bool:
        """Return whether the logits are a linear map, and `maxmoe.ops.route` alone makes their routing."""
        return type(self) is RouterRule

    def row_size(self, config: "MoEConfig") -> int:
        """Return the width of the rows that the linear map takes."""
        return config.hidden_size

    def make(self, config: "MoEConfig", **options: Any) -> nn.Module | None:
        """Create the router of a layer, with a device and dtype as options; None for `maxmoe.nn.Router`."""
        return None

    def logits(self, products: Tensor) -> Tensor:
        """Return the logits ``(T, E)``, given the linear map of the tokens."""
        return products

    def select(self, config: "MoEConfig", logits: Tensor, correction_bias: Tensor | None) -> Tensor | None:
        """Return the selected experts ``(T, K)``; None to select the best ones as `maxmoe.ops.route` does."""
        return None

    def weigh(self, config: "MoEConfig", weights: Tensor, of_shared: Tensor | None) -> Weighed:
        """Return weights of the selected and of the shared experts; None for shared experts without weights.

        Args:
            config: config of the layer.
            weights: ``(T, K)``, weights of the selected experts; with `normalizes`, their scores.
            of_shared: ``(T, n)``, logits of the shared experts; None without `scores_shared_experts`.
        """
        return weights, None

    def reference_rows(self, tokens: Tensor, parameters: Mapping[str, Tensor], previous: Tensor | None) -> Tensor:
        """Return the input of the linear map ``(T, R)`` of tokens ``(T, D)``, given the state of the layer before."""
        return tokens

    def reference_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of the linear map's results."""
        return logits

    def reference_select(self, config: "MoEConfig", logits: Tensor, correction_bias: Tensor | None) -> Tensor | None:
        """Return the selected experts ``(T, K)`` of logits ``(T, E)``; None for the best scores."""
        return None

    def reference_select_by_ids(
        self, config: "MoEConfig", logits: Tensor, ids: Tensor, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the selected experts ``(S, K)`` of one sequence, given its ids ``(S,)``, with `takes_ids`."""
        raise NotImplementedError

    def reference_weights(self, config: "MoEConfig", scored: Scored, parameters: Mapping[str, Tensor]) -> Weighed:
        """Return the weights of the routed and of the shared experts."""
        return scored.weights, None


PLAIN = RouterRule()


class ActivationRule(Component):
    """Activation with numbers of its own, in the place of a name and an `activation_limit`."""

    def arguments(self, config: "MoEConfig", *, of_shared: bool) -> dict[str, Any]:
        """Return arguments of `maxmoe.ops.expert_ffn` for the routed or for the shared experts."""
        raise NotImplementedError


@component
class SiTU(ActivationRule):
    """SwiGLU whose gate and up are bounded by a tanh: "situ" of `maxmoe.ops.expert_ffn`.

    Args:
        gate_softcap: bound of the linear factor of the gate.
        up_softcap: bound of up.

    Source: Kimi K3; the soft-capped SwiGLU of Inkling 2 in transformers.
    """

    gate_softcap: float
    up_softcap: float

    def __post_init__(self) -> None:
        check_number("gate_softcap", self.gate_softcap, above=0)
        check_number("up_softcap", self.up_softcap, above=0)

    def check(self, config: "MoEConfig") -> None:
        """Raise without a gate, and with a limit, which the softcaps replace."""
        config.require("activation=SiTU(...)", gated=True, activation_limit=None)

    def arguments(self, config: "MoEConfig", *, of_shared: bool) -> dict[str, Any]:
        """Return the softcaps."""
        return {"activation": "situ", "gate_softcap": self.gate_softcap, "up_softcap": self.up_softcap}


@component
class ZeroComputation(Component):
    """Experts without matrix products that the router selects beside the others; see `nn.ZeroComputationExperts`.

    Args:
        zero: number of experts whose output is zero.
        copy: number of experts whose output is their input.
        constant: number of experts whose output is a mixture of their input and a trained vector.

    Source: MoE++ (arXiv:2410.07348) section 3.1; LongCat-Flash (arXiv:2509.01322) section 2.1, for copies.
    """

    zero: int = 0
    copy: int = 0
    constant: int = 0

    def __post_init__(self) -> None:
        for name in ("zero", "copy", "constant"):
            check_int(name, getattr(self, name), at_least=0)

    def check(self, config: "MoEConfig") -> None:
        """Raise with groups, which the other experts form, and if a constant expert would get a scaled input."""
        if self.count:
            config.require(str(self), num_groups=1)
        if self.constant:
            config.require(str(self), apply_weights_to="output")

    @property
    def count(self) -> int:
        """Number of experts of all kinds."""
        return self.zero + self.copy + self.constant

    @property
    def has_outputs(self) -> bool:
        """Whether there are experts whose output is not zero."""
        return self.copy + self.constant > 0


@component
class ExpertNorms(Component):
    """RMS norms around the routed experts; see `maxmoe.nn.LatentNorm`.

    Args:
        latent_in: normalize the rows after the projection to latent experts, as in Muse Spark.
        latent_out: normalize the sum over the experts before the projection out, as in Kimi K3.
        output: normalize the output of each expert before it is weighted, as in Muse Spark; all share the norm.
        input: normalize the tokens that the routed experts get; router and shared experts get them as they are, as in
            Gemma 4.
        sum: normalize the output of the layer, the sum of all experts, as in A.X-K1 and Gemma 4.
        eps: epsilon of the norms of tokens, latent rows and the sum.
        output_eps: epsilon of the norm of the outputs.
    """

    latent_in: bool = False
    latent_out: bool = False
    output: bool = False
    input: bool = False
    sum: bool = False
    eps: float = 1e-5
    output_eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("latent_in", "latent_out", "output", "input", "sum"):
            check_bool(name, getattr(self, name))
        for name in ("eps", "output_eps"):
            check_number(name, getattr(self, name), above=0)

    def check(self, config: "MoEConfig") -> None:
        """Raise for norms of latent rows that the layer does not have, and of outputs that have been weighted."""
        if (self.latent_in or self.latent_out) and config.latent_size is None:
            raise ValueError(f"{self} needs a latent_size, got None")
        if self.output:
            config.require(str(self), apply_weights_to="output")
