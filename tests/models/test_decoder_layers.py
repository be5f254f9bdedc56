"""A decoder with one config per layer, against a decoder assembled from the layers of other decoders."""

import dataclasses

import pytest
import torch
from torch import Tensor

from maxmoe.costs import estimate, explain
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.sharding import Mesh
from support.small_decoder import MOE, SIZES, make, tokens_like

WIDE = dataclasses.replace(MOE, num_experts=3, top_k=1, intermediate_size=13, normalization="none")
CONFIGS = (MOE, WIDE)


def assembled(model: Decoder) -> Decoder:
    """A decoder of one config whose second MoE layer is taken from a decoder of the other one."""
    state = model.state_dict()
    result, other = make(moe=MOE), make(moe=WIDE)
    result.blocks[2] = other.blocks[2]
    result.load_state_dict(state)
    return result


def flat(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """Logits, auxiliary loss, counts and all gradients."""
    output = model(tokens)
    loss = output.logits.square().mean() + output.aux_loss
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    return [output.logits, output.aux_loss, *(stats.tokens_per_expert for stats in output.stats), *gradients]


def test_layers_are_those_of_their_configs() -> None:
    model = make(moe=CONFIGS)
    tokens = tokens_like(model)
    assert [layer.config for layer in model.moe_layers()] == [MOE, WIDE]
    torch.testing.assert_close(flat(model, tokens), flat(assembled(model), tokens), rtol=0, atol=0)


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
