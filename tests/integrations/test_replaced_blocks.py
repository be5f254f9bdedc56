"""Models of transformers with replaced blocks: outputs, losses and gradients equal the original code's."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import maxmoe
from maxmoe import MoEFeedForward, StatsAccumulator, record_routing, replay_routing
from maxmoe.integrations.transformers import TransformersMoE, replace_moe_blocks
from maxmoe.integrations.transformers._transformers import is_experts
from support.properties import read_properties
from support.replaced_models import IDS, PRESETS, TOLERANCE, assert_same, padding, replaced, small_model, step
from support.small_models import SAME_LAYERS, block_of, blocks_of, import_models

RETURNS_SCORES = ["gpt_oss", "llama4"]


@pytest.mark.parametrize("preset", PRESETS)
def test_equals_the_code_of_the_family(preset: str) -> None:
    """Without padding, and with padding on both sides: router logits and balance loss are among the values."""
    eager, ours = small_model(preset), replaced(preset)
    both_sides = torch.cat([padding(1, "left"), padding(3, "right")[1:]])
    for ids, mask in ((IDS[:1], None), (IDS, both_sides)):
        expected = step(eager, ids, mask, output_router_logits=True)
        got = step(ours, ids, mask, output_router_logits=True)
        has_loss = hasattr(import_models(preset)[0], "load_balancing_loss_func")
        assert ("aux_loss" in expected) == (has_loss and not eager.config.is_encoder_decoder)
        assert_same(got, expected, mask, 1e-12 if preset == "dbrx" else TOLERANCE)  # all of DBRX is in float64


@pytest.mark.parametrize("family", SAME_LAYERS)
def test_families_with_the_layers_of_a_preset(family: str) -> None:
    eager, ours = small_model(family), replaced(family)
    mask = padding(3, "left")
    expected = step(eager, IDS, mask, output_router_logits=True)
    assert_same(step(ours, IDS, mask, output_router_logits=True), expected, mask)


def test_says_what_it_did() -> None:
    model = small_model("qwen3_moe")
    first, second = replace_moe_blocks(model)
    assert first == ("model.layers.0.mlp", "qwen3_moe", "Qwen3MoeSparseMoeBlock", 6, 3)
    assert second.path == "model.layers.1.mlp" and isinstance(model.get_submodule(second.path), TransformersMoE)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_property_raises(preset: str) -> None:
    assert any(issubclass(kind, TransformersMoE) for kind in read_properties(replaced(preset)))


def test_dense_layers_stay() -> None:
    model = small_model("glm4_moe", first_k_dense_replace=1)
    expected = step(copy.deepcopy(model), IDS, padding(3, "right"))
    assert [block.path for block in replace_moe_blocks(model)] == ["model.layers.1.mlp"]
    assert_same(step(model, IDS, padding(3, "right")), expected, padding(3, "right"))


# Losses and statistics


def test_no_auxiliary_loss_by_default() -> None:
    """No balance loss, as in transformers, although the config of the model has a coefficient."""
    model = replaced("mixtral")
    assert model.config.router_aux_loss_coef > 0
    accumulator = StatsAccumulator(model)
    step(model, IDS)
    assert accumulator.update().aux_loss == 0


@pytest.mark.parametrize("num_layers", [1, 3])
def test_factor_between_both_balance_losses(num_layers: int) -> None:
    """maxmoe sums the loss over the layers; transformers pools the tokens of all layers."""
    theirs = replaced("mixtral", num_hidden_layers=num_layers)
    ours = replaced("mixtral", training={"load_balance_loss_weight": 0.5, "load_balance_scope": "batch"},
                    num_hidden_layers=num_layers)  # fmt: skip
    mask = padding(3, "right")
    accumulator, top_k = StatsAccumulator(ours), 2
    logits = step(theirs, IDS, mask, output_router_logits=True)["router_logits"]
    step(ours, IDS, mask)
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    each = [load_balancing_loss_func((layer.flatten(0, 1),), 6, top_k, mask) for layer in logits]
    torch.testing.assert_close(accumulator.update().aux_loss, 0.5 / top_k * sum(each).double(), rtol=1e-5, atol=0)


def test_padding_is_not_counted() -> None:
    model, mask = replaced("mixtral"), padding(3, "left")
    accumulator = StatsAccumulator(model)
    step(model, IDS, mask)
    for stats in accumulator.update().layers.values():
        assert stats.tokens_per_expert.sum() == 2 * mask.sum()


def test_correction_biases_move_and_are_saved() -> None:
    for preset in ("deepseek_v3", "minimax_m2", "longcat_flash", "ernie4_5_moe"):
        model = replaced(preset, training={"correction_bias_update_rate": 0.125})
        name = next(name for name in model.state_dict() if name.endswith("e_score_correction_bias"))
        before, accumulator = model.state_dict()[name].clone(), StatsAccumulator(model)
        step(model, IDS)
        counts = next(iter(accumulator.update().layers.values())).tokens_per_expert
        expected = before + 0.125 * (counts.double().mean() - counts).sign()
        torch.testing.assert_close(model.state_dict()[name], expected.to(before.dtype))


@pytest.mark.parametrize("preset", ["mixtral", "deepseek_v3", "llama4", "switch_transformers"])
def test_recorded_routing_is_replayed(preset: str) -> None:
    model, mask = replaced(preset), padding(3, "left")
    with record_routing(model) as record:
        expected = step(model, IDS, mask)
    with replay_routing(model, record):
        assert_same(step(model, IDS, mask), expected, mask, 1e-12)
    for (ids,) in record.calls.values():
        ids[:, 2:] = -1  # as if a server had not reported them
    with replay_routing(model, record, missing="natural"):
        assert_same(step(model, IDS, mask), expected, mask, 1e-12)


def test_a_block_without_the_logits_of_its_shared_experts_replays_nothing() -> None:
    model = replaced("inkling")
    with record_routing(model) as record:
        step(model, IDS)
    with (
        pytest.raises(ValueError, match="replay_routing needs the logits of the shared"),
        replay_routing(model, record),
    ):
        step(model, IDS)


# Single blocks


@pytest.mark.parametrize("preset", PRESETS)
def test_a_block_alone(preset: str) -> None:
    """The layer has the output of the block, and its modules, so that nothing is converted."""
    block = block_of(preset).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = block(x)
    if hasattr(block, "experts") and is_experts(block.experts):  # others have no experts implementations
        block.experts.config._experts_implementation = "maxmoe"
    layer = TransformersMoE.from_transformers(block)
    got = layer(x)
    if preset in RETURNS_SCORES:
        expected, got = expected[0].view(x.shape), got[0]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    other = block_of(preset).double()
    other.load_state_dict(layer.state_dict())
    assert all(map(torch.equal, other.state_dict().values(), layer.state_dict().values()))


def test_one_block_of_a_model_warns() -> None:
    with pytest.warns(UserWarning, match=r"converts one block alone: .* Call maxmoe.*replace_moe_blocks\(model\)$"):
        MoEFeedForward.from_transformers(block_of("mixtral"))


@pytest.mark.parametrize("preset", RETURNS_SCORES)
def test_one_block_that_returns_a_tuple_is_refused(preset: str) -> None:
    block = block_of(preset)
    with pytest.raises(ValueError, match=r"returns a tuple, .*replace_moe_blocks\(model\)$"):
        MoEFeedForward.from_transformers(block)
    assert not any(tensor.is_meta for tensor in block.parameters())


# Refusals


def refused(model: nn.Module, match: str, error: type[Exception] = ValueError, **training: Any) -> None:
    before = dict(model.named_modules())
    with pytest.raises(error, match=match):
        replace_moe_blocks(model, **training)
    assert dict(model.named_modules()) == before


def test_nothing_is_replaced_if_one_block_cannot_be() -> None:
    model = small_model("mixtral")
    model.model.layers[1].mlp.extra = nn.Linear(2, 2)
    refused(model, r"^model.layers.1.mlp \(MixtralSparseMoeBlock\) cannot be replaced: .*not known extra")


def test_refusals() -> None:
    refused(nn.Linear(2, 2), r"^Linear must have sparse blocks of transformers, got none$")
    refused(replaced("mixtral"), "must have sparse blocks of transformers, got none$")
    refused(small_model("gemma4"), r"^model.layers.0 .* cannot be replaced: the parts of the sparse block of gemma4")
    refused(nn.ModuleDict({"mlp": block_of("mixtral")}), "needs a model of transformers, got ModuleDict$")
    model = small_model("mixtral")
    refused(model, "has no field 'num_experts', only load_balance_loss_weight", TypeError, num_experts=3)
    model.config.model_type = "jamba"
    refused(model, "cannot be replaced: model_type must be one of .*mixtral.*got 'jamba'")


def test_another_experts_implementation_is_refused() -> None:
    model = replaced("mixtral")
    model.set_experts_implementation("eager")
    with pytest.raises(
        ValueError, match="experts implementation of a model with replaced blocks must be 'maxmoe', got"
    ):
        model(IDS)


def test_recomputed_experts_have_the_same_gradients() -> None:
    model = replaced("mixtral")
    saved: list[int] = []

    def saved_step() -> dict[str, Tensor]:
        saved.append(0)

        def pack(tensor: Tensor) -> Tensor:
            saved[-1] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return step(model, IDS)

    expected = saved_step()
    maxmoe.set_recompute(model, ("experts", "dispatch"))
    got = saved_step()
    # Gate and up, of width 10, of the 2 experts of each token in 2 layers.
    assert saved[0] - saved[1] == 2 * 2 * 20 * IDS.numel()
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


def test_copies_and_pickles(tmp_path: Any) -> None:
    model = replaced("deepseek_v3")
    expected = step(model, IDS, padding(3, "left"))
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert_same(step(other, IDS, padding(3, "left")), expected, padding(3, "left"), 1e-12)
    assert blocks_of(model).keys() == {"model.layers.0", "model.layers.1"}
