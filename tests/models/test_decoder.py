"""`maxmoe.models.Decoder` against a plain decoder that computes one head and one position at a time."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maxmoe import MoE, MoEConfig, reference
from maxmoe.costs import estimate, explain
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.sharding import Mesh
from support.operator_checks import compile_whole
from support.small_decoder import MOE, SIZES, make, tokens_like


def plain_attention(x: Tensor, state: dict[str, Tensor], config: DecoderConfig) -> Tensor:
    """Attention of one sequence [S, D]: rotation as complex product, loops over heads and positions."""
    H, G, C = config.num_heads, config.num_key_value_heads, config.head_dim
    assert G is not None and C is not None
    frequencies = config.rope_theta ** (-2 * torch.arange(C // 2, dtype=x.dtype) / C)

    def head(name: str, index: int, turns: bool) -> list[Tensor]:
        rows = []
        for position, row in enumerate(x @ state[f"{name}.weight"][index * C : (index + 1) * C].T):
            turned = torch.complex(row[: C // 2], row[C // 2 :]) * torch.exp(1j * position * frequencies)
            rows.append(torch.cat((turned.real, turned.imag)) if turns else row)
        return rows

    heads = []
    for h in range(H):
        g = h // (H // G)
        queries, keys, values = head("q_proj", h, True), head("k_proj", g, True), head("v_proj", g, False)
        rows = []
        for s, query in enumerate(queries):
            scores = torch.stack([query @ key / math.sqrt(C) for key in keys[: s + 1]]).softmax(0)
            rows.append(sum(score * value for score, value in zip(scores, values[: s + 1], strict=True)))
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1) @ state["o_proj.weight"].T


def plain_decoder(model: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits, auxiliary loss and tokens per expert, from the state dict alone."""
    state, config = dict(model.state_dict(keep_vars=True)), model.config

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * state[name]

    x = state["embedding.weight"][tokens]
    aux_loss, counts = torch.zeros((), dtype=x.dtype), []
    for layer in range(config.num_layers):
        block = f"blocks.{layer}."
        normed = norm(x, block + "attention_norm.weight")
        x = x + torch.stack([plain_attention(row, part(block + "attention."), config) for row in normed])
        normed, weights = norm(x, block + "feed_forward_norm.weight"), part(block + "feed_forward.")
        if layer < config.num_dense_layers:
            gate, up, down = (weights[f"{name}_proj.weight"].T for name in ("gate", "up", "down"))
            x = x + (F.silu(normed @ gate) * (normed @ up)) @ down
        else:
            moe = config.moe_per_block[layer]
            assert moe is not None
            update, loss, tokens_per_expert, _ = reference.moe(normed, moe, weights)
            x, aux_loss = x + update, aux_loss + loss
            counts.append(tokens_per_expert)
    output = state["embedding.weight" if config.tie_embeddings else "output.weight"]
    return norm(x, "norm.weight") @ output.T, aux_loss, counts


WIDE = dataclasses.replace(MOE, num_experts=3, top_k=1, intermediate_size=13, normalization="none")
CONFIGS = (MOE, WIDE)  # of the two blocks that are not dense


@pytest.mark.parametrize("changes", [{}, {"moe": CONFIGS, "tie_embeddings": True}], ids=["plain", "two configs, tied"])
def test_equals_the_plain_decoder_with_all_gradients(changes: dict[str, Any]) -> None:
    model = make(**changes)
    tokens = tokens_like(model)
    output = model(tokens)
    logits, aux_loss, counts = plain_decoder(model, tokens)
    torch.testing.assert_close(output.logits, logits, rtol=1e-6, atol=1e-6)  # the angles are in float32
    torch.testing.assert_close(output.aux_loss, aux_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close([stats.tokens_per_expert for stats in output.stats], counts)
    parameters = dict(model.named_parameters())
    weights = torch.randn_like(logits)
    actual = torch.autograd.grad((output.logits * weights).sum() + output.aux_loss, list(parameters.values()))
    expected = torch.autograd.grad((logits * weights).sum() + aux_loss, list(parameters.values()))
    for name, one, other in zip(parameters, actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_dense_model_has_no_auxiliary_loss_and_no_statistics() -> None:
    output = make(moe=None, num_dense_layers=0)(torch.zeros(1, 3, dtype=torch.int64))
    assert output.aux_loss == 0 and output.stats == ()


PARTS = ("attention", "dispatch", "experts", "feed_forward", "norms", "shared_experts")


@pytest.mark.parametrize("recompute", [("blocks",), PARTS], ids=["blocks", "parts"])
def test_recomputed_parts_give_the_same_bits(recompute: tuple[str, ...]) -> None:
    plain, recomputed = make(), make(recompute=recompute)
    recomputed.load_state_dict(plain.state_dict())
    tokens = tokens_like(plain)
    results = []
    for model in (plain, recomputed):
        output = model(tokens)
        (output.logits.logsumexp(-1).mean() + output.aux_loss).backward()
        results.append((output.logits, output.tokens_per_expert, *(p.grad for p in model.parameters())))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_stay_close(dtype: torch.dtype) -> None:
    model = make(dtype=torch.float32)
    half = Decoder(model.config, dtype=dtype)
    half.load_state_dict(model.state_dict())
    tokens = tokens_like(model)
    output = half(tokens)
    assert output.logits.dtype == dtype
    assert output.aux_loss.dtype == torch.float32
    expected = model(tokens).logits
    assert (output.logits.float() - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize("recompute", [(), pytest.param(PARTS, marks=pytest.mark.slow)], ids=["saved", "recomputed"])
def test_compiles_as_one_graph(recompute: tuple[str, ...]) -> None:
    """One dense and one MoE block."""
    model = make(num_layers=2, recompute=recompute)
    tokens = tokens_like(model)
    results = []
    for run in (model, compile_whole(model, "aot_eager" if recompute else "eager")):
        output = run(tokens)
        loss = output.logits.logsumexp(-1).mean() + output.aux_loss
        results.append((output.logits, *torch.autograd.grad(loss, list(model.parameters()))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


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


# One config per layer


def test_the_same_config_everywhere_is_one_config() -> None:
    torch.manual_seed(1)
    several = make(moe=(MOE, MOE))
    torch.manual_seed(1)
    one = make()
    torch.testing.assert_close(several.state_dict(), one.state_dict(), rtol=0, atol=0)
    assert isinstance(several.config.moe, tuple) and hash(several.config)
    assert several.config.moe_per_block == one.config.moe_per_block == (None, MOE, MOE)


def test_correction_biases_move() -> None:
    model = make(moe=CONFIGS)
    output = model(tokens_like(model))
    with pytest.raises(ValueError, match=r"tokens_per_expert needs layers with one number of experts, got \[5, 3\]"):
        _ = output.tokens_per_expert
    first, second = (layer.router.score_correction_bias.zero_() for layer in model.moe_layers())
    counts = [torch.tensor([9, 0, 3, 3, 0]), torch.tensor([3, 3, 3])]
    model.update_correction_bias(counts)
    torch.testing.assert_close(first, torch.tensor([-0.01, 0.01, 0.0, 0.0, 0.01]).double())
    assert not second.any()
    with pytest.raises(ValueError, match="shorter"):
        model.update_correction_bias(counts[:1])


def test_costs_of_each_layer() -> None:
    mesh = Mesh.planned({})
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**{**SIZES, "moe": CONFIGS}))
    explained = explain(model, mesh, "ep-as-dp")
    assert "[5, 12, 7]" in str(explained) and "[3, 12, 13]" in str(explained)
    assert len(explained.dispatch) == 2
    memory = estimate(model, mesh, "ep-as-dp", batch_size=2, sequence_length=8).memory
    assert memory["parameters"] == sum(parameter.nbytes for parameter in model.parameters())
