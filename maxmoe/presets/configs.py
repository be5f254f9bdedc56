"""Conversion of the configs of transformers to `MoEConfig`."""

from collections.abc import Callable, Mapping
from typing import Any

from maxmoe.checks.fields import check_bool, check_int, check_number
from maxmoe.config import MoEConfig
from maxmoe.presets.families import FAMILIES
from maxmoe.presets.family import Family, LayerField

# Families whose blocks compute something else in transformers than their paper says.
_WRONG_THERE = {
    "nllb-moe": "NllbMoeExperts of transformers gives all tokens to experts 0 and 1, whatever the router selects",
}


def family_of(config: Any) -> Family:
    """Return the family of a transformers config, or of its `text_config` if it has one, by `model_type`."""
    model_type = getattr(_text_config(config), "model_type", None)
    if model_type in _WRONG_THERE:
        raise ValueError(f"model_type {model_type!r} has no layer with the same output: {_WRONG_THERE[model_type]}")
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type must be one of {', '.join(FAMILIES)}, got {model_type!r} ({type(config).__name__})"
        )
    return FAMILIES[model_type]


def from_transformers(config: Any, layer: int | None = None) -> MoEConfig:
    """Convert the config of a transformers model to a `MoEConfig`.

    Fields that the transformers config does not have, such as the weights of some losses, are taken from the preset of
    the family. `router_aux_loss_coef` is multiplied by K, see `maxmoe/presets/published.py`.

    Args:
        config: transformers config of a family in `maxmoe.presets`, or multimodal config with a `text_config`.
        layer: index of a layer of the model, for a model whose layers differ, such as Step-3.7.

    Returns:
        Config of the Mixture-of-Experts layers of the model, or of this layer.

    Raises:
        ValueError: for another family, for a field that is missing, contradicts others or is not supported, and for a
            field that differs between the layers if `layer` is None.
    """
    fields, text_config = family_of(config).layer_fields, _text_config(config)
    return converted(config, {name: _of_layer(text_config, name, field, layer) for name, field in fields.items()})


def _of_layer(config: Any, name: str, field: LayerField, layer: int | None) -> Any:
    """Return the value of a field in a layer, or in all of them."""
    num_layers = _get(config, "num_hidden_layers", 1)
    if layer is not None:
        if layer not in range(num_layers):
            raise ValueError(f"layer must be in [0, num_hidden_layers ({num_layers})), got {layer}")
        return field.of_config(config, layer)
    first, *others = (field.of_config(config, index) for index in range(num_layers))
    for index, value in enumerate(others, 1):
        if value != first:
            raise ValueError(
                f"layer must be given for a {config.model_type} config whose layers differ, got None: {name} is "
                f"{first!r} in layer 0 and {value!r} in layer {index}"
            )
    return first


def converted(config: Any, of_layer: Mapping[str, Any]) -> MoEConfig:
    """Convert the config of a transformers model, given the fields of `MoEConfig` that differ between its layers."""
    family = family_of(config)
    config = _text_config(config)
    for attribute, values in family.required.items():
        value = attribute_at(config, attribute, values[0])
        if value not in values:
            allowed = " or ".join(map(repr, values))
            raise ValueError(f"{attribute} of a {config.model_type} config must be {allowed}, got {value!r}")
    top_k = family.fields.get("top_k")
    fields = {ours: _read(config, theirs, top_k) for ours, theirs in family.fields.items()}
    try:
        return family.preset(**fields, **of_layer)
    except ValueError as error:
        renamed = [
            f"{ours} is its {theirs}"
            for ours, theirs in family.fields.items()
            if isinstance(theirs, str) and ours in str(error) and ours != theirs
        ]
        raise ValueError("; ".join([f"{config.model_type} config: {error}", *renamed])) from error


def _text_config(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


def _read(config: Any, attribute: str | Callable[[Any], Any], top_k: Any) -> Any:
    """Return an attribute of a transformers config, converted for `MoEConfig`; `top_k` names the attribute with K."""
    if callable(attribute):
        return attribute(config)
    if attribute in ("n_group", "topk_group"):
        has_none = config.model_type == "axk2" and getattr(config, attribute, None) is None
        if has_none or getattr(config, "topk_method", None) == "greedy":
            return 1
    if attribute == "moe_latent_size":
        return getattr(config, attribute, None)
    if attribute == "ffn_config.moe_normalize_expert_weights":  # p of the p-norm that divides the weights
        return "none" if attribute_at(config, attribute) is None else "sum"
    value = _get(config, attribute)
    where = f"{attribute} of the {config.model_type} config"
    match attribute:
        case "ffn_config.ffn_act_fn":
            return value.get("name", "silu")
        case "hidden_act" | "mlp_hidden_act" if isinstance(value, str):
            return {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}.get(value, value)
        case "norm_topk_prob":
            check_bool(where, value)
            return "sum" if value else "none"
        case "router_aux_loss_coef" | "aux_loss_coef" | "ffn_config.moe_loss_weight":
            check_number(where, value, at_least=0)
            return value * (1 if top_k is None else _get(config, top_k, 1))
        case "shared_expert_intermediate_size" | "moe_shared_expert_intermediate_size" | "share_expert_dim":
            width, size = _get(config, attribute, 0), _get(config, "moe_intermediate_size", 1)
            if width % size:
                raise ValueError(f"{attribute} ({width}) must be a multiple of moe_intermediate_size ({size})")
            return width // size
    return value


def _get(config: Any, attribute: str, at_least: int | None = None) -> Any:
    """Return an attribute of a transformers config; with a bound, an int."""
    value = attribute_at(config, attribute)
    if value is None:
        raise ValueError(f"{attribute} is missing in the {config.model_type} config; transformers >= 5.20 has it")
    if at_least is not None:
        check_int(f"{attribute} of the {config.model_type} config", value, at_least=at_least)
    return value


def attribute_at(config: Any, path: str, default: Any = None) -> Any:
    """Return an attribute of an object, or of an object that it contains."""
    for name in path.split("."):
        config = getattr(config, name, default)
    return config
