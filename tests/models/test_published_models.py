"""Sizes of published models, against the numbers of their authors."""

import pytest

from maxmoe.families.family import published_models
from maxmoe.models import Decoder, DecoderConfig

# Billions of parameters as their authors count them, for models whose attention Decoder implements.
BILLIONS = {
    "mixtral": 46.7,
    "qwen2_moe": 57.4,
    "qwen3_moe": 235.1,
    "olmoe": 6.92,
    "minimax_m2": 228.7,
    "gpt_oss": 116.8,
    "llama4": 400.7,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_published_sizes_give_the_published_number_of_parameters(name: str) -> None:
    published = published_models()[name]
    num_dense_layers = published.sizes.get("num_dense_layers", 0)
    num_moe_layers = published.sizes["num_layers"] - num_dense_layers

    def count(num_layers: int) -> int:
        config = DecoderConfig.of_published(published, num_layers=num_layers)
        return sum(parameter.numel() for parameter in Decoder(config, device="meta").parameters())

    one, two = (count(num_dense_layers + layers) for layers in (1, 2))
    total = one + (num_moe_layers - 1) * (two - one)
    assert total / 1e9 == pytest.approx(BILLIONS[name], rel=2e-3)
