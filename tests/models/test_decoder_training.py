"""A Decoder in training."""

import pytest
import torch
import torch.nn.functional as F

from maxmoe.models import Decoder, DecoderConfig
from support.small_decoder import SIZES, make


def test_bias_update_reaches_every_layer() -> None:
    model = make(dtype=None)
    counts = torch.tensor([[9, 0, 3, 3, 0], [3, 3, 3, 3, 3]])
    model.update_correction_bias(counts)
    first, second = (layer.router.score_correction_bias for layer in model.moe_layers())
    torch.testing.assert_close(first, torch.tensor([-0.01, 0.01, 0.0, 0.0, 0.01]))
    assert not second.any()
    with pytest.raises(ValueError, match="shorter"):
        model.update_correction_bias(counts[:1])


def test_learns_a_repeated_sequence() -> None:
    model = Decoder(DecoderConfig(**{**SIZES, "num_layers": 2}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    tokens = torch.tensor([[1, 5, 2, 5, 3, 5, 4, 1, 5, 2, 5, 3, 5, 4, 1]])
    for _ in range(200):  # on another processor, other roundings took the loss of 100 steps from 0.19 to 0.24
        output = model(tokens[:, :-1])
        loss = F.cross_entropy(output.logits[0], tokens[0, 1:])
        optimizer.zero_grad()
        (loss + output.aux_loss).backward()
        optimizer.step()
        model.update_correction_bias(output.tokens_per_expert)
    assert loss < 0.2
    assert model.generate(tokens[:, :2], 5, temperature=0).tolist() == [[1, 5, 2, 5, 3, 5, 4]]
