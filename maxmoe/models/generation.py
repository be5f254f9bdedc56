"""Generation of tokens with a `Decoder`."""

from typing import Any

import torch
from torch import Tensor

from maxmoe._torch.compile import call_uncompiled
from maxmoe.nn import MoE
from maxmoe.ranks.token_group import LocalTokens, same_tokens_everywhere


def generate(decoder: Any, tokens: Tensor, num_tokens: int, *, temperature: float, top_k: int | None) -> Tensor:
    """Append tokens to a prompt; see `Decoder.generate`."""
    window, length = decoder.config.max_sequence_length, tokens.shape[1] + num_tokens

    def extended(inputs: Tensor) -> Tensor:
        # Compiled code is made for each number of earlier tokens, up to a limit, after which training has none.
        logits = call_uncompiled(decoder, inputs).logits
        return torch.cat((tokens, sample(logits[:, -1].float(), temperature, top_k)), dim=-1)

    # Until the window moves, keys and values of the earlier tokens are kept. When it moves, the first token is no
    # longer there for the others, whose keys and values change in all layers but the first.
    if all(map(_is_causal, decoder.moe_layers())):
        with same_tokens_everywhere(decoder, lambda: ContinuedSequences(min(window, length))):
            num_computed = 0
            while tokens.shape[1] < length and tokens.shape[1] <= window:
                num_computed, tokens = tokens.shape[1], extended(tokens[:, num_computed:])
    with same_tokens_everywhere(decoder):
        while tokens.shape[1] < length:
            tokens = extended(tokens[:, -window:])
    return tokens


def sample(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Draw a token ``(B, 1)`` of each sequence, given the logits ``(B, V)``; the most likely one for temperature 0."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    values, candidates = logits.topk(top_k or logits.shape[-1])
    return candidates.gather(1, torch.multinomial((values / temperature).softmax(-1), 1))


def _is_causal(layer: MoE) -> bool:
    """Return whether the output for a token is independent of later tokens, which may take places of experts."""
    return layer.config.capacity_factor is None and layer.config.buffer_factor is None


class ContinuedSequences(LocalTokens):
    """Token group of a module that is called with one part of its sequences after the other, in a single process.

    `all_gather_sequence` returns a part with those of all earlier calls, so that attention has a cache of keys and
    values. A module gathers the same tensors, in the same order, after asking for the first position in every call.

    Args:
        max_length: largest length of the sequences.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length, self._length, self._num_gathered = max_length, 0, 0
        self._gathered: list[Tensor] = []

    def first_position(self, length: int) -> int:
        """Return the number of tokens of all earlier calls."""
        start, self._num_gathered = self._length, 0
        self._length += length
        return start

    def all_gather_sequence(self, part: Tensor, dim: int) -> Tensor:
        """Return the sequences so far."""
        if self._num_gathered == len(self._gathered):
            shape = (*part.shape[:dim], self._max_length, *part.shape[dim + 1 :])
            self._gathered.append(part.new_empty(shape))
        whole = self._gathered[self._num_gathered]
        self._num_gathered += 1
        whole.narrow(dim, self._length - part.shape[dim], part.shape[dim]).copy_(part)
        return whole.narrow(dim, 0, self._length)
