"""DecoderConfig: contradictions are refused."""

import dataclasses
from typing import Any

import pytest

from maxmoe.models import DecoderConfig
from support.small_decoder import MOE, SIZES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a positive int, got 0"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide num_heads \(4\)"),
        (
            {"num_heads": 5, "num_key_value_heads": 5, "head_dim": None},
            r"num_heads \(5\) must divide hidden_size \(12\)",
        ),
        ({"head_dim": 3}, "head_dim must be even for the rotary embedding, got 3"),
        ({"hidden_size": 24}, r"moe.hidden_size \(12\) must equal hidden_size \(24\)"),
        ({"num_dense_layers": 4}, r"num_dense_layers \(4\) must not exceed num_layers \(3\)"),
        ({"num_dense_layers": -1}, "num_dense_layers must be an int >= 0, got -1"),
        ({"vocab_size": 2**40}, "vocab_size must be an int below 2\\^31, got 1099511627776"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite float > 0, got nan"),
        ({"norm_eps": float("inf")}, "norm_eps must be a finite float >= 0, got inf"),
        ({"tie_embeddings": "no"}, "tie_embeddings must be True or False, got 'no'"),
        ({"recompute": "experts"}, "recompute must be a tuple of names, got 'experts'"),
        ({"moe": {"hidden_size": 12}}, r"moe must be a MoEConfig, got \{'hidden_size': 12\}"),
        ({"moe": (MOE,)}, "moe must have a config for each of the 2 layers that are not dense, got 1"),
        ({"moe": [MOE, None]}, r"moe\[1\] must be a MoEConfig, got None"),
        (
            {"moe": (MOE, dataclasses.replace(MOE, hidden_size=8))},
            r"moe\[1\].hidden_size \(8\) must equal hidden_size \(12\)",
        ),
        ({"intermediate_size": None}, "intermediate_size must be given where there are dense blocks, got None"),
    ],
)
def test_contradictions_in_the_config_name_both_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**{**SIZES, **changes})


def test_an_unknown_keyword_gets_the_nearest_field() -> None:
    with pytest.raises(TypeError, match="DecoderConfig has no field 'vocabulary_size'; the nearest are 'vocab_size'"):
        DecoderConfig(**SIZES, vocabulary_size=8)  # type: ignore[call-arg]
