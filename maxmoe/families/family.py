"""What is known of a family of models in transformers, and the register of the families.

The weights of the balance loss in presets are for `maxmoe.nn.load_balance_loss`, which is 1 if the load is balanced.
The loss of transformers is a sum over the K choices, this one a mean, so the weights here are K times
`router_aux_loss_coef`. transformers takes the mean over the layers, whereas the sum of all `aux_loss` is a sum over the
layers: for the same total with L layers, divide these weights by L. DeepSeek sums over the layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple, TypeAlias

from maxmoe.checks.fields import check_bool, check_int, check_number
from maxmoe.config import MoEConfig
from maxmoe.families.layouts import Layout

Preset: TypeAlias = Callable[..., MoEConfig]
Fields: TypeAlias = Mapping[str, "str | Field"]  # paths in the transformers config by the names in `MoEConfig`

_FAMILIES: dict[str, "Family"] = {}
_PUBLISHED: dict[str, "PublishedModel"] = {}


class Field(NamedTuple):
    """A field of `MoEConfig` that is not equal to the attribute of the transformers config at this path."""

    attribute: str
    read: Callable[[Any, str], Any]  # function of the whole transformers config and the path


class LayerField(NamedTuple):
    """A field of `MoEConfig` that differs between the layers of a model."""

    of_config: Callable[[Any, int], Any]  # function of the transformers config and the index of a layer
    of_block: Callable[[Any, Any], Any]  # function of the transformers config and the sparse block of the layer


@dataclass(kw_only=True)
class Family:
    """A family of models in transformers. It decorates the function that returns the config of its flagship.

    The function becomes the preset, whose `overrides` replace fields of the config.

    Args:
        model_types: `model_type` of the transformers configs of the family, by default the name of the preset.
        fields: attribute of the transformers config for each field of `MoEConfig` that it has.
        layer_fields: where each field of `MoEConfig` is that differs between layers.
        required: supported values of attributes of the transformers config; the attribute may be absent.
        block: layout of the weights of the sparse block in memory.
        stored: layout of the weights in published checkpoints, if it differs.
        returns_scores: whether the sparse block returns a tuple, with scores that the model drops.
        logits_index: index of the logits in the tuple that the router of the block returns.
        own_parameters: parameters of the block that `MoE` lacks.
        has_capacity: whether the router gets sequences and drops tokens of experts that are full.
        beyond_layer: what the block computes and `MoE` does not, so that its weights are not converted.
        scales_sum: whether the sparse block multiplies the sum over the experts by the factor of the routing weights.
        lies_in_layer: whether the parts of the block are modules of the decoder layer, beside others, so that there is
            no block to replace; the decoder layer is the block whose weights are converted.
    """

    model_types: tuple[str, ...] = ()
    preset: Preset = field(init=False)
    fields: Fields
    layer_fields: Mapping[str, LayerField] = field(default_factory=dict)
    required: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    block: Layout
    stored: Layout | None = None
    returns_scores: bool = False
    logits_index: int = 0
    own_parameters: tuple[str, ...] = ()
    has_capacity: bool = False
    beyond_layer: str = ""
    scales_sum: bool = False
    lies_in_layer: bool = False

    def __call__(self, flagship: Callable[[], MoEConfig]) -> Preset:
        """Return the preset, and register the family with it."""

        def preset(**overrides: Any) -> MoEConfig:
            return replace(flagship(), **overrides)

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(preset, name, getattr(flagship, name))
        self.register(preset)
        return preset

    def register(self, preset: Preset) -> None:
        """Register the family with a preset, which may be the preset of another family."""
        self.preset = preset
        _FAMILIES.update(dict.fromkeys(self.model_types or (preset.__name__,), self))

    @property
    def checkpoint(self) -> Layout:
        """Layout of the weights in published checkpoints."""
        return self.stored or self.block

    @property
    def published_block(self) -> str:
        """Name of the module around the experts in a published checkpoint, in a block of the decoder."""
        key = next(entry.key for entry in self.checkpoint.entries if entry.is_of_experts)
        return f"{self.checkpoint.prefix}{key}".partition("experts")[0].rstrip(".")

    @property
    def published_experts(self) -> dict[str, str] | None:
        """Names of the projections of an expert in that module, as "experts.{expert}.w1"; None for stacks."""
        entries = [entry for entry in self.checkpoint.entries if entry.is_of_experts]
        if not all("experts.{expert}." in entry.key for entry in entries):
            return None
        names = [entry.key[entry.key.index("experts") :].removesuffix(".weight") for entry in entries]
        return {entry.names[0].removeprefix("experts."): name for entry, name in zip(entries, names, strict=True)}

    def check_replaceable(self) -> None:
        """Raise if no module of transformers is the sparse block."""
        if self.lies_in_layer:
            raise ValueError(
                f"the parts of the sparse block of {self.preset.__name__} are modules of its decoder layer, which "
                'calls each by itself: call model.set_experts_implementation("maxmoe") instead'
            )

    def check_convertible(self) -> None:
        """Raise if a `MoE` layer computes something else than the block with the same weights."""
        if self.beyond_layer:
            raise ValueError(
                f"the blocks of {self.preset.__name__} have {self.beyond_layer}: their weights are not converted, call "
                "maxmoe.integrations.transformers.replace_moe_blocks(model)"
            )


@dataclass
class PublishedModel:
    """A published model. It decorates the preset of its layers.

    Args:
        name: name of the model.
        layers: number of layers. Layers of multi-token prediction do not count.
        heads: numbers of query heads, of key-value heads if it differs, and the head dim if it is not 128.
        vocab_size: number of token ids.
        dense: number of dense layers and their width.
        differs: differences of a `Decoder` of these sizes from the published model.
        layer: preset of its Mixture-of-Experts layers.
    """

    name: str
    layers: int
    heads: tuple[int, ...]
    vocab_size: int
    dense: tuple[int, ...] = ()
    differs: str = ""
    layer: Preset = MoEConfig

    def __call__(self, preset: Preset) -> Preset:
        """Register the model under the name of the preset."""
        self.layer, _PUBLISHED[preset.__name__] = preset, self
        return preset

    @property
    def sizes(self) -> dict[str, int]:
        """Fields of `maxmoe.models.DecoderConfig`."""
        sizes = {"head_dim": 128, "num_layers": self.layers, "vocab_size": self.vocab_size}
        sizes |= zip(("num_heads", "num_key_value_heads", "head_dim"), self.heads, strict=False)
        sizes |= zip(("num_dense_layers", "intermediate_size"), self.dense, strict=False)
        return sizes


# Differences that several models have.
LATENT = "plain attention with the same number of heads, of size 128, instead of latent attention"
NORMED_HEADS = "no norms of queries and keys"


def sizes(*values: int) -> dict[str, Any]:
    """Return the sizes of every `MoEConfig` by their names: hidden_size, intermediate_size, num_experts, top_k."""
    return dict(zip(("hidden_size", "intermediate_size", "num_experts", "top_k"), values, strict=True))


@cache
def families() -> Mapping[str, Family]:
    """Return all families by `model_type`, sorted. The first call imports every file of the folder."""
    for module in iter_modules([str(Path(__file__).parent)]):
        import_module(f"maxmoe.families.{module.name}")
    return dict(sorted(_FAMILIES.items()))


def published_models() -> Mapping[str, PublishedModel]:
    """Return the published models by the names of the presets of their layers."""
    families()
    return _PUBLISHED


def attribute_at(config: Any, path: str, default: Any = None) -> Any:
    """Return an attribute of an object, or of an object that it contains."""
    for name in path.split("."):
        config = getattr(config, name, default)
    return config


def value_at(config: Any, path: str, at_least: int | None = None) -> Any:
    """Return an attribute of a transformers config, which must have it; with a bound, an int."""
    value = attribute_at(config, path)
    if value is None:
        raise ValueError(f"{path} is missing in the {config.model_type} config; transformers >= 5.20 has it")
    if at_least is not None:
        check_int(f"{path} of the {config.model_type} config", value, at_least=at_least)
    return value


def number_at(config: Any, path: str, *, above: float = -math.inf, at_least: float = -math.inf) -> Any:
    """Return an attribute of a transformers config that is a number."""
    value = value_at(config, path)
    check_number(f"{path} of the {config.model_type} config", value, above=above, at_least=at_least)
    return value


def activation(config: Any, path: str) -> Any:
    """Return the name of an activation here."""
    value = value_at(config, path)
    names = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
    return names.get(value, value) if isinstance(value, str) else value


def normalization(config: Any, path: str) -> str:
    """Return the normalization, for which there is a bool."""
    value = value_at(config, path)
    check_bool(f"{path} of the {config.model_type} config", value)
    return "sum" if value else "none"


def loss_weight(config: Any, path: str, top_k: str | None = "num_experts_per_tok") -> Any:
    """Return the weight of a balance loss, multiplied by K: there the loss is a sum over the choices, here a mean."""
    value = number_at(config, path, at_least=0)
    return value * (1 if top_k is None else value_at(config, top_k, 1))


def num_of_width(config: Any, path: str) -> int:
    """Return the number of shared experts, for which there is the sum of their widths."""
    width, size = value_at(config, path, 0), value_at(config, "moe_intermediate_size", 1)
    if width % size:
        raise ValueError(f"{path} ({width}) must be a multiple of moe_intermediate_size ({size})")
    return int(width // size)


def without(name: str, fields: Fields) -> dict[str, str | Field]:
    """Return the fields of another family except one, which the config in transformers lacks."""
    return {ours: theirs for ours, theirs in fields.items() if ours != name}


# Fields that several families have under the same names.
FIELDS: dict[str, str | Field] = {
    "hidden_size": "hidden_size",
    "top_k": "num_experts_per_tok",
    "activation": Field("hidden_act", activation),
}
MIXTRAL_FIELDS = FIELDS | {
    "intermediate_size": "intermediate_size",
    "num_experts": "num_local_experts",
    "load_balance_loss_weight": Field("router_aux_loss_coef", loss_weight),
}
QWEN3_FIELDS = MIXTRAL_FIELDS | {
    "intermediate_size": "moe_intermediate_size",
    "num_experts": "num_experts",
    "normalization": Field("norm_topk_prob", normalization),
}
QWEN2_FIELDS = QWEN3_FIELDS | {"num_shared_experts": Field("shared_expert_intermediate_size", num_of_width)}
DEEPSEEK_FIELDS = FIELDS | {
    "intermediate_size": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "routed_scaling_factor": "routed_scaling_factor",
    "num_groups": "n_group",
    "top_k_groups": "topk_group",
}
DEEPSEEK_V3_FIELDS = DEEPSEEK_FIELDS | {"normalization": Field("norm_topk_prob", normalization)}
