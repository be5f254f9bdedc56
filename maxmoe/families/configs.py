"""Conversion of the configs of transformers to `MoEConfig`."""

from collections.abc import Mapping
from typing import Any

from maxmoe.config import MoEConfig
from maxmoe.families.family import Family, LayerField, attribute_at, families, value_at

# Families whose blocks compute something else in transformers than their paper says.
_WRONG_THERE = {
    "nllb-moe": "NllbMoeExperts of transformers gives all tokens to experts 0 and 1, whatever the router selects",
}


def family_of(config: Any) -> Family:
    """Return the family of a transformers config, or of its `text_config` if it has one, by `model_type`."""
    model_type: Any = getattr(_text_config(config), "model_type", None)
    if model_type in _WRONG_THERE:
        raise ValueError(f"model_type {model_type!r} has no layer with the same output: {_WRONG_THERE[model_type]}")
    if model_type not in families():
        raise ValueError(
            f"model_type must be one of {', '.join(families())}, got {model_type!r} ({type(config).__name__})"
        )
    return families()[model_type]


def from_transformers(config: Any, layer: int | None = None) -> MoEConfig:
    """Convert the config of a transformers model to a `MoEConfig`.

    Fields that the transformers config does not have, such as the weights of some losses, are taken from the preset of
    the family. `router_aux_loss_coef` is multiplied by K, see `maxmoe/families/family.py`.

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
    num_layers = value_at(config, "num_hidden_layers", 1)
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
    places = {ours: (theirs, value_at) if isinstance(theirs, str) else theirs for ours, theirs in family.fields.items()}
    fields = {ours: read(config, theirs) for ours, (theirs, read) in places.items()}
    try:
        return family.preset(**fields, **of_layer)
    except ValueError as error:
        wrong = [(ours, theirs) for ours, (theirs, _) in places.items() if ours in str(error) and ours != theirs]
        renamed = [f"{ours} is its {theirs}" for ours, theirs in wrong]
        raise ValueError("; ".join([f"{config.model_type} config: {error}", *renamed])) from error


def _text_config(config: Any) -> Any:
    return getattr(config, "text_config", None) or config
