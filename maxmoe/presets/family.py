"""What is known of a family of models in transformers: names of fields and weights, and what its blocks compute."""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from maxmoe.config import MoEConfig
from maxmoe.presets.layouts import Layout


class LayerField(NamedTuple):
    """A field of `MoEConfig` that differs between the layers of a model.

    Attributes:
        of_config: function of the transformers config and the index of a layer that returns the value.
        of_block: function of the transformers config and the sparse block of the layer that returns the value.
    """

    of_config: Callable[[Any, int], Any]
    of_block: Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models in transformers.

    Args:
        preset: preset with the values of all fields that the transformers config does not have.
        fields: attribute of the transformers config for each field of `MoEConfig`, or a function of the config.
        layer_fields: where each field of `MoEConfig` is that differs between layers.
        required: supported values of attributes of the transformers config; the attribute may be absent.
        block: layout of the weights of the sparse block in memory.
        checkpoint: layout of the weights in published checkpoints.
        returns_scores: whether the sparse block returns a tuple, with scores that the model drops.
        logits_index: index of the logits in the tuple that the router of the block returns.
        own_parameters: parameters of the block that `MoE` lacks.
        has_capacity: whether the router gets sequences and drops tokens of experts that are full.
        beyond_layer: what the block computes and `MoE` does not, so that its weights are not converted.
        scales_sum: whether the sparse block multiplies the sum over the experts by the factor of the routing weights.
        has_state: whether the block takes the state of the router of the block before, and returns its own, the last
            output of its router.
    """

    preset: Callable[..., MoEConfig]
    fields: Mapping[str, str | Callable[[Any], Any]]
    layer_fields: Mapping[str, LayerField] = field(default_factory=dict)
    required: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    block: Layout
    checkpoint: Layout
    returns_scores: bool = False
    logits_index: int = 0
    own_parameters: tuple[str, ...] = ()
    has_capacity: bool = False
    beyond_layer: str = ""
    scales_sum: bool = False
    has_state: bool = False

    def check_convertible(self) -> None:
        """Raise if a `MoE` layer computes something else than the block with the same weights."""
        if self.beyond_layer:
            raise ValueError(
                f"the blocks of {self.preset.__name__} have {self.beyond_layer}: their weights are not converted, call "
                "maxmoe.integrations.transformers.replace_moe_blocks(model)"
            )


def in_list(attribute: str) -> Callable[[Any, int], Any]:
    """Return a function of a transformers config and a layer: the element of the layer in a list, or None."""

    def element(config: Any, layer: int) -> Any:
        values = getattr(config, attribute, None)
        if not values:
            return None
        if not isinstance(values, list | tuple) or len(values) <= layer:
            raise ValueError(
                f"{attribute} of a {config.model_type} config must be a list with an element for each of the "
                f"num_hidden_layers ({config.num_hidden_layers}) layers, got {reprlib.repr(values)}"
            )
        return values[layer]

    return element


def limit(value: Any) -> Any:
    """Return a limit, for which there may be 0 or infinity if there is none."""
    return None if not value or value == math.inf else value
