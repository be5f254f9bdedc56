"""Tokens that a Decoder generates, and what wrong calls get."""

import pytest
import torch

from support.small_decoder import make, tokens_like


def test_greedy_generation_takes_the_likeliest_token_of_the_window() -> None:
    model = make(max_sequence_length=4)
    tokens = tokens_like(model, sequence=3)
    expected = tokens
    for _ in range(6):
        best = model(expected[:, -4:]).logits[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat((expected, best), dim=1)
    assert torch.equal(model.generate(tokens, 6, temperature=0), expected)
    assert torch.equal(model.generate(tokens, 6, top_k=1), expected)


def test_sampled_frequencies_follow_the_logits() -> None:
    model = make()
    tokens = torch.tensor([[3, 1, 4]])
    logits = model(tokens).logits[0, -1]
    drawn = model.generate(tokens.expand(4000, 3), 1, temperature=0.3, top_k=3)[:, -1]
    kept = logits.topk(3).indices
    expected = torch.zeros(11, dtype=logits.dtype)
    expected[kept] = (logits[kept] / 0.3).softmax(-1)
    torch.testing.assert_close(torch.bincount(drawn, minlength=11) / 4000, expected.float(), rtol=0, atol=0.03)


def test_wrong_calls_say_what_they_got() -> None:
    model = make()
    with pytest.raises(ValueError, match="tokens must have at most 16 positions, got 17"):
        model(tokens_like(model, sequence=17))
    with pytest.raises(ValueError, match=r"need tokens and temperature >= 0, got \[1, 0\], 1\.0"):
        model.generate(torch.zeros(1, 0, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"got \[1, 2\], -1"):
        model.generate(torch.zeros(1, 2, dtype=torch.int64), 1, temperature=-1)
