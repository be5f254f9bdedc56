"""A decoder small enough for loops: one dense block, two MoE blocks, all options in use."""

from typing import Any

import torch
from torch import Tensor

from maxmoe import MoEConfig
from maxmoe.models import Decoder, DecoderConfig

MOE = MoEConfig(
    hidden_size=12,
    intermediate_size=7,
    num_experts=5,
    top_k=2,
    score_function="sigmoid",
    score_correction_bias=True,
    correction_bias_update_rate=0.01,
    num_shared_experts=1,
    load_balance_loss_weight=0.1,
)
SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 12,
    "num_layers": 3,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 9,
    "moe": MOE,
    "num_dense_layers": 1,
    "max_sequence_length": 16,
}


def make(dtype: torch.dtype | None = torch.float64, **changes: Any) -> Decoder:
    """A small decoder with one dense and two MoE blocks, with parameters large enough to matter."""
    model = Decoder(DecoderConfig(**{**SIZES, **changes}), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (parameter.ndim == 1))
    return model


def tokens_like(model: Decoder, batch: int = 2, sequence: int = 7) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, sequence))
