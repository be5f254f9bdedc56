"""Generation of tokens with a `Decoder`."""

from typing import Any

import torch
from torch import Tensor

from maxmoe._torch.compile import call_uncompiled
from maxmoe.nn import MoE
from maxmoe.ranks.token_group import ContinuedSequences, same_tokens_everywhere


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
