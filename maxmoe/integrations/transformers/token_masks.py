"""The padding of a batch, from the attention mask of a model of transformers to its replaced blocks.

A model calls its sparse blocks with hidden states alone. The mask travels as a keyword argument to the decoder layers,
and through the checkpoint of a layer, so that a recomputation in the backward has it as well.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe._torch import has_pre_hook
from maxmoe._torch.this_thread import OfThisThread
from maxmoe.integrations.transformers._transformers import replace_checkpoint

_ARGUMENT = "maxmoe_token_mask"
# Mask (B, S), False for padding, of the decoder layer that this thread runs.
mask_of_this_layer: OfThisThread[Tensor | None] = OfThisThread()


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
    scores, in which nobody attends to padding, not even itself; or several such masks by name. `cache` has further keys
    before the tokens' entries.
    """
    if isinstance(attention_mask, dict):
        attention_mask = next((mask for mask in attention_mask.values() if mask is not None), None)
        if attention_mask is None:
            return None
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() not in (2, 4):
        kind = type(attention_mask).__name__
        got = f"{attention_mask.dim()} dims" if isinstance(attention_mask, Tensor) else kind
        raise ValueError(
            f"attention_mask must have the dims (batch, keys) or (batch, heads, queries, keys), from which replaced "
            f"blocks know the padding, got {got}"
        )
    if attention_mask.dim() == 2:
        return attention_mask[:, -length:] != 0
    place = torch.arange(length, device=attention_mask.device)
    itself = attention_mask[:, 0, place, place + (0 if cache is None else cache.get_seq_length())]
    is_attended = itself > torch.finfo(itself.dtype).min / 2 if itself.is_floating_point() else itself != 0
    return is_attended.expand(batch, -1)


def _enter(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    mask_of_this_layer.value = options.pop(_ARGUMENT, None)
    replace_checkpoint(layer, _Checkpoint)
    return arguments, options


def _leave(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    mask_of_this_layer.value = None


class _Checkpoint:
    """Checkpoint of the forward of a layer whose recomputation has the mask that the forward had."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, forward: Callable[..., Any], *arguments: Any) -> Any:
        mask = mask_of_this_layer.value

        def run(*arguments: Any) -> Any:
            with mask_of_this_layer.set(mask):
                return forward(*arguments)

        return self.checkpoint(run, *arguments)
