"""`maxmoe.models.Decoder` in use: its parameters, training, generation, and what wrong calls get."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from maxmoe import MoE, MoEConfig
from maxmoe.models import Decoder, DecoderConfig
from support.small_decoder import SIZES, make, tokens_like


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


def test_a_model_on_meta_is_completed_by_reset_parameters() -> None:
    model = Decoder(DecoderConfig(**SIZES), device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(float("nan"))
    model.reset_parameters()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert model(tokens_like(model)).logits.isfinite().all()


def test_initial_parameters() -> None:
    moe = MoEConfig(hidden_size=128, intermediate_size=96, num_experts=4, top_k=2, num_shared_experts=1)
    sizes = {
        **SIZES,
        "hidden_size": 128,
        "head_dim": 32,
        "intermediate_size": 200,
        "num_layers": 8,
        "moe": moe,
    }
    model, layer = Decoder(DecoderConfig(**sizes)), MoE(moe)
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


def test_bias_update_reaches_every_layer() -> None:
    model = make(dtype=None)
    counts = torch.tensor([[9, 0, 3, 3, 0], [3, 3, 3, 3, 3]])
    model.update_correction_bias(counts)
    first, second = (layer.router.score_correction_bias for layer in model.moe_layers())
    torch.testing.assert_close(first, torch.tensor([-0.01, 0.01, 0.0, 0.0, 0.01]))
    assert not second.any()
    with pytest.raises(ValueError, match="shorter"):
        model.update_correction_bias(counts[:1])


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a positive int, got 0"),
        ({"num_layers": True}, "num_layers must be a positive int, got True"),
        ({"head_dim": 2.5}, "head_dim must be a positive int, got 2.5"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide num_heads \(4\)"),
        (
            {"num_heads": 5, "num_key_value_heads": 5, "head_dim": None},
            r"num_heads \(5\) must divide hidden_size \(12\)",
        ),
        ({"head_dim": 3}, "head_dim must be even for the rotary embedding, got 3"),
        ({"hidden_size": 24}, r"moe.hidden_size \(12\) must equal hidden_size \(24\)"),
        ({"num_dense_layers": 4}, r"num_dense_layers \(4\) must be from 0 to num_layers \(3\)"),
        (
            {"intermediate_size": None},
            "intermediate_size must be given where there are dense blocks, got None",
        ),
    ],
)
def test_contradictions_in_the_config_name_both_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**{**SIZES, **changes})


def test_wrong_calls_say_what_they_got() -> None:
    model = make()
    with pytest.raises(ValueError, match="tokens must have at most 16 positions, got 17"):
        model(tokens_like(model, sequence=17))
    with pytest.raises(ValueError, match=r"need tokens and temperature >= 0, got \[1, 0\], 1\.0"):
        model.generate(torch.zeros(1, 0, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"got \[1, 2\], -1"):
        model.generate(torch.zeros(1, 2, dtype=torch.int64), 1, temperature=-1)


def test_learns_a_repeated_sequence() -> None:
    model = Decoder(DecoderConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    tokens = torch.tensor([[1, 5, 2, 5, 3, 5, 4, 1, 5, 2, 5, 3, 5, 4, 1]])
    for _ in range(60):
        output = model(tokens[:, :-1])
        loss = F.cross_entropy(output.logits[0], tokens[0, 1:])
        optimizer.zero_grad()
        (loss + output.aux_loss).backward()
        optimizer.step()
        model.update_correction_bias(output.tokens_per_expert)
    assert loss < 0.2
    assert model.generate(tokens[:, :2], 5, temperature=0).tolist() == [[1, 5, 2, 5, 3, 5, 4]]
