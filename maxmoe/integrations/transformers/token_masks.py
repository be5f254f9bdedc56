"""The padding of a batch, from the attention mask of a model of transformers to its replaced blocks.

A model calls its sparse blocks with hidden states alone. The mask travels as a keyword argument to the decoder layers,
whose hooks set it for their blocks. A recomputation of a layer without its hooks, or of a block alone, has it from the
forward: see `OfThisThread.read`.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe._torch import has_pre_hook
from maxmoe._torch.this_thread import OfThisThread

_ARGUMENT = "maxmoe_token_mask"
# In a tuple, the mask (B, S), False for padding, of the decoder layer that this thread runs, or None.
_mask_of_this_layer: OfThisThread[tuple[Tensor | None]] = OfThisThread("token mask")


def mask_of_call(block: nn.Module) -> Tensor | None:
    """Return the mask of the decoder layer that calls a block; None without one, and outside of a layer."""
    mask = _mask_of_this_layer.read(block)
    return None if mask is None else mask[0]


def hand_over_masks(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Let replaced blocks in the layers of a model, to which it passes arguments, read its attention mask."""
    if not has_pre_hook(model, _add_mask):
        model.register_forward_pre_hook(_add_mask, with_kwargs=True)
    for layer in layers:
        if not has_pre_hook(layer, _enter):
            layer.register_forward_pre_hook(_enter, with_kwargs=True)
            layer.register_forward_hook(_leave, always_call=True)


def _add_mask(model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    given = options
    if len(arguments) > 1:  # only then, because it takes time
        given = {**inspect.signature(model.forward).bind_partial(*arguments).arguments, **options}
    mask = given.get("attention_mask")
    if mask is None:
        return arguments, options
    inputs = (*arguments[:1], given.get("input_ids"), given.get("inputs_embeds"))
    tokens = next(value for value in inputs if value is not None)
    caches = (given.get(name) for name in ("cache", "past_key_values"))  # the older name
    cache = next((cache for cache in caches if cache is not None), None)
    return arguments, {**options, _ARGUMENT: token_mask(mask, tokens.shape[0], tokens.shape[1], cache)}


def token_mask(attention_mask: Any, batch: int, length: int, cache: Any = None) -> Tensor | None:
    """Return the mask ``(batch, length)`` of tokens that are not padding.

    An attention mask is ``(B, keys)``, other than 0 for tokens; or ``(B, heads, length, keys)``, bool or added to the
    scores, in which nobody attends to padding, not even itself; or several such masks by name, all of which tell the
    padding. `cache` has further keys before the tokens' entries.
    """
    if isinstance(attention_mask, dict):
        given = {name: mask for name, mask in attention_mask.items() if mask is not None}
        if not given:
            return None
        attention_mask = given[min(given)]  # the names come in the order of a set, another one in each process
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() not in (2, 4):
        kind = type(attention_mask).__name__
        got = f"{attention_mask.dim()} dims" if isinstance(attention_mask, Tensor) else kind
        raise ValueError(
            f"attention_mask must have the dims (batch, keys) or (batch, heads, queries, keys), from which replaced "
            f"blocks know the padding, got {got}"
        )
    if attention_mask.dim() == 2:
        return attention_mask[:, -length:] != 0
    queries = torch.arange(length, device=attention_mask.device)
    itself = attention_mask[:, 0, queries, queries + _num_keys_before(cache, length, attention_mask.shape[-1])]
    is_attended = itself > torch.finfo(itself.dtype).min / 2 if itself.is_floating_point() else itself != 0
    return is_attended.expand(batch, -1)


def _num_keys_before(cache: Any, length: int, num_keys: int) -> Any:
    """Return the number of keys before the new tokens' keys in a mask with `num_keys` keys.

    The mask is of the layers whose cache has that many: a layer with a sliding window has dropped its first keys.
    """
    if cache is None:
        return 0
    sizes = (layer.get_mask_sizes(length) for layer in cache.layers if hasattr(layer, "get_mask_sizes"))
    num_dropped = next((dropped for kept, dropped in sizes if kept == num_keys), 0)
    return cache.get_seq_length() - num_dropped


def _enter(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    _mask_of_this_layer.value = (options.pop(_ARGUMENT, None),)
    return arguments, options


def _leave(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    _mask_of_this_layer.value = None
