"""Blocks that are replaced, alone and in models, and those that are refused before anything changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

pytest.importorskip("transformers")


from maxmoe import MoE, MoEFeedForward
from maxmoe.convert.checkpoint import write_checkpoint
from maxmoe.integrations.transformers import TransformersMoE, replace_moe_blocks
from support.replaced_models import IDS, replaced, small_model
from support.small_models import REPLACED_ONLY, block_of

RETURNS_SCORES = ["gpt_oss", "llama4"]


def test_says_what_it_did() -> None:
    model = small_model("qwen3_moe")
    first, second = replace_moe_blocks(model)
    assert first == ("model.layers.0.mlp", "qwen3_moe", "Qwen3MoeSparseMoeBlock", 6, 3)
    assert second.path == "model.layers.1.mlp" and isinstance(model.get_submodule(second.path), TransformersMoE)


@pytest.mark.parametrize("preset", ["mixtral", *RETURNS_SCORES])
def test_a_block_alone(preset: str) -> None:
    """The layer has the output of the block, and its modules, so that nothing is converted."""
    block = block_of(preset).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = block(x)
    if preset != "llama4":  # which has no experts implementation
        block.experts.config._experts_implementation = "maxmoe"
    layer = TransformersMoE.from_transformers(block)
    got = layer(x)
    if preset in RETURNS_SCORES:
        expected, got = expected[0].view(x.shape), got[0]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    block_of(preset).load_state_dict(layer.state_dict())


def test_one_block_of_a_model_warns() -> None:
    with pytest.warns(UserWarning, match=r"converts one block alone: .* Call maxmoe.*replace_moe_blocks\(model\)$"):
        MoEFeedForward.from_transformers(block_of("mixtral"))


@pytest.mark.parametrize("preset", RETURNS_SCORES)
def test_one_block_that_returns_a_tuple_is_refused(preset: str) -> None:
    block = block_of(preset)
    with pytest.raises(ValueError, match=r"returns a tuple, .*replace_moe_blocks\(model\)$"):
        MoEFeedForward.from_transformers(block)
    assert not any(tensor.is_meta for tensor in block.parameters())


@pytest.mark.parametrize("preset", REPLACED_ONLY)
def test_weights_of_blocks_that_compute_more_than_a_layer_are_not_converted(preset: str, tmp_path: Path) -> None:
    block = block_of(preset)
    layer = MoE(TransformersMoE.from_transformers(block).config)
    message = r"their weights are not converted, call .*replace_moe_blocks\(model\)$"
    for refused in (
        lambda: MoE.from_transformers(block),
        lambda: layer.to_transformers(block),
        lambda: write_checkpoint(tmp_path / "file", {"model.layers.0": layer}, preset),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    assert not any(tensor.is_meta for tensor in [*block.parameters(), *layer.parameters()])


def with_another_module() -> Any:
    model = small_model("mixtral")
    model.model.layers[1].mlp.extra = nn.Linear(2, 2)
    return model


def of_another_type() -> Any:
    model = small_model("mixtral")
    model.config.model_type = "jamba"
    return model


REFUSED: dict[str, Any] = {
    r"^model.layers.1.mlp \(MixtralSparseMoeBlock\) cannot be replaced: .*not known extra": with_another_module,
    r"^Linear must have sparse blocks of transformers, got none$": lambda: nn.Linear(2, 2),
    "must have sparse blocks of transformers, got none$": lambda: replaced("mixtral"),
    r"^model.layers.0 .* cannot be replaced: the parts of the sparse block of gemma4": lambda: small_model("gemma4"),
    "needs a model of transformers, got ModuleDict$": lambda: nn.ModuleDict({"mlp": block_of("mixtral")}),
    "cannot be replaced: model_type must be one of .*mixtral.*got 'jamba'": of_another_type,
}


@pytest.mark.parametrize(("message", "make"), REFUSED.items())
def test_refused_models_are_left_as_they_are(message: str, make: Any) -> None:
    model = make()
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        replace_moe_blocks(model)
    assert dict(model.named_modules()) == before


def test_other_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="has no field 'num_experts', only load_balance_loss_weight"):
        replace_moe_blocks(small_model("mixtral"), num_experts=3)


# Changes after the replacement


def test_another_experts_implementation_is_refused() -> None:
    model = replaced("mixtral")
    model.set_experts_implementation("eager")
    message = "experts implementation of a model with replaced blocks must be 'maxmoe', got"
    with pytest.raises(ValueError, match=message):
        model(IDS)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT
def test_adapters_of_experts_that_would_be_left_out_are_refused() -> None:
    model = replaced("switch_transformers").float()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["wi"]))
    with pytest.raises(ValueError, match="must have matrices in a Linear, got Linear: merge or remove adapters"):
        adapted(input_ids=IDS, labels=IDS)
