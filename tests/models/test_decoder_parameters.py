"""Parameters of a Decoder: names, shapes and initial values."""

import math

import pytest
import torch
import torch.nn.functional as F

from maxmoe import MoE, MoEConfig
from maxmoe.models import Decoder, DecoderConfig
from support.small_decoder import SIZES


def test_state_dict_names_and_shapes_are_stable() -> None:
    shapes = {name: tuple(value.shape) for name, value in Decoder(DecoderConfig(**SIZES)).state_dict().items()}
    attention = {
        "attention_norm.weight": (12,),
        "attention.q_proj.weight": (24, 12),
        "attention.k_proj.weight": (12, 12),
        "attention.v_proj.weight": (12, 12),
        "attention.o_proj.weight": (12, 24),
        "feed_forward_norm.weight": (12,),
    }
    dense = {
        "feed_forward.gate_proj.weight": (9, 12),
        "feed_forward.up_proj.weight": (9, 12),
        "feed_forward.down_proj.weight": (12, 9),
    }
    sparse = {
        "feed_forward.router.weight": (5, 12),
        "feed_forward.router.score_correction_bias": (5,),
        "feed_forward.experts.gate_proj": (5, 12, 7),
        "feed_forward.experts.up_proj": (5, 12, 7),
        "feed_forward.experts.down_proj": (5, 7, 12),
        "feed_forward.shared_experts.gate_proj": (12, 7),
        "feed_forward.shared_experts.up_proj": (12, 7),
        "feed_forward.shared_experts.down_proj": (7, 12),
    }
    blocks = [{**attention, **dense}, {**attention, **sparse}, {**attention, **sparse}]
    expected = {"embedding.weight": (11, 12), "norm.weight": (12,), "output.weight": (11, 12)}
    expected |= {f"blocks.{i}.{name}": shape for i, block in enumerate(blocks) for name, shape in block.items()}
    assert shapes == expected


def test_initial_parameters() -> None:
    """Of a model on meta, `reset_parameters` draws all of them."""
    moe = MoEConfig(hidden_size=128, intermediate_size=96, num_experts=4, top_k=2, num_shared_experts=1)
    sizes = {**SIZES, "hidden_size": 128, "head_dim": 32, "intermediate_size": 200, "num_layers": 8, "moe": moe}
    model, layer = Decoder(DecoderConfig(**sizes), device="meta").to_empty(device="cpu"), MoE(moe)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(float("nan"))
    model.reset_parameters()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    state = model.state_dict()
    for name in ("embedding", "output", "blocks.3.attention.q_proj", "blocks.0.feed_forward.up_proj"):
        assert state[f"{name}.weight"].std() == pytest.approx(0.02, rel=0.1), name
    for name in ("blocks.3.attention.o_proj", "blocks.0.feed_forward.down_proj"):
        assert state[f"{name}.weight"].std() == pytest.approx(0.02 / 4, rel=0.1), name
    for name, alone in layer.state_dict().items():
        ratio = 1 / 4 if name.endswith("down_proj") else 1
        actual = state[f"blocks.5.feed_forward.{name}"].std()
        assert actual == pytest.approx(float(alone.std()) * ratio, rel=0.15), name
    loss = F.cross_entropy(model(torch.arange(11)[None]).logits[0], torch.arange(11)).item()
    assert loss == pytest.approx(math.log(11), abs=0.3)
