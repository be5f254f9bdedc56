"""Blocks of families without experts implementations: the values of the family's code in float64."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

from maxmoe import MoE, StatsAccumulator
from maxmoe.convert.checkpoint import write_checkpoint
from maxmoe.integrations.transformers import TransformersMoE, replace_moe_blocks
from support.replaced_models import IDS, padding, replaced, step
from support.small_models import REPLACED_ONLY, block_of

PATCHED = ["llama4", "longcat_flash", "dbrx", *REPLACED_ONLY]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let routers compute in float64 what they compute in float32, so that rounding does not hide a difference."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)


def values(block: nn.Module, x: Tensor, cotangent: Tensor, **options: Any) -> dict[str, Tensor]:
    """Output and gradients; zero for experts without tokens, which have no gradient in the family's code."""
    leaf = x.clone().requires_grad_()
    out = block(leaf, **options)
    out = (out[0] if isinstance(out, tuple) else out).view(x.shape)
    out.backward(cotangent)
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
    zeros = {name: torch.zeros_like(parameter) for name, parameter in block.named_parameters()}
    found = {name: zeros[name] if gradient is None else gradient for name, gradient in gradients.items()}
    return {"out": out.detach(), "x": leaf.grad, **found}  # type: ignore[dict-item]


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("preset", PATCHED)
def test_equals_the_code_of_the_family(exact: None, preset: str, is_padded: bool) -> None:
    eager: Any = block_of(preset, expert_capacity=1).double()  # one of 7 tokens has no place in 6 experts
    if hasattr(eager.router, "dtype"):
        eager.router.dtype = torch.float64
    losses = {"load_balance_loss_weight": 0.0, "router_z_loss_weight": 0.0}
    ours = TransformersMoE.from_transformers(copy.deepcopy(eager), **losses)
    x, cotangent = (torch.randn(3, 7, 16, dtype=torch.float64, generator=torch.manual_seed(at)) for at in (1, 2))
    mask = padding(3, "left").bool()
    # The router of Switch Transformers counts padding.
    options = {"token_mask": mask} if is_padded and not ours.family.has_capacity else {}
    if is_padded:
        cotangent[~mask] = 0
    expected, got = values(eager, x, cotangent), values(ours, x, cotangent, **options)
    assert got.keys() == expected.keys() and all(each.dtype == torch.float64 for each in got.values())
    for name, value in expected.items():
        both = got[name], value
        if is_padded and name == "out":
            both = got[name][mask], value[mask]
        torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12 * value.abs().max().item(), msg=name)


@pytest.mark.parametrize("preset", REPLACED_ONLY)
def test_weights_of_blocks_that_compute_more_than_a_layer_are_not_converted(preset: str, tmp_path: Any) -> None:
    block = block_of(preset)
    ours = TransformersMoE.from_transformers(block)
    layer, message = MoE(ours.config), r"their weights are not converted, call .*replace_moe_blocks\(model\)$"
    for refused in (
        lambda: MoE.from_transformers(block),
        lambda: layer.to_transformers(block),
        lambda: write_checkpoint(tmp_path / "file", {"model.layers.0": layer}, preset),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    assert not any(tensor.is_meta for tensor in [*block.parameters(), *layer.parameters()])


def test_tokens_that_a_router_drops_are_counted() -> None:
    model = replaced("switch_transformers")
    layers = [layer for layer in model.modules() if isinstance(layer, TransformersMoE)]
    one_hot: list[Tensor] = []
    for layer in layers:
        layer.part("router").register_forward_hook(lambda _router, _inputs, outputs: one_hot.append(outputs[0]))
    accumulator = StatsAccumulator(model)
    step(model, IDS)
    stats = list(accumulator.update().layers.values())
    assert len(stats) == 2 and layers[0].declaration.needs_whole_sequences
    for each, kept in zip(stats, one_hot, strict=True):
        assert torch.equal(each.tokens_per_expert, kept.sum((0, 1)))
        assert each.dropped == IDS.numel() - kept.sum() > 0


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT
def test_adapters_of_experts_that_would_be_left_out_are_refused() -> None:
    model = replaced("switch_transformers").float()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["wi"]))
    with pytest.raises(ValueError, match="must have matrices in a Linear, got Linear: merge or remove adapters"):
        adapted(input_ids=IDS, labels=IDS)


def test_nllb_moe_is_refused_because_its_router_selects_among_two_experts() -> None:
    sizes = {"d_model": 16, "encoder_ffn_dim": 10, "decoder_ffn_dim": 10, "vocab_size": 32, "num_experts": 6}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "router_dtype": "float32"}
    model: Any = NllbMoeForConditionalGeneration(NllbMoeConfig(**sizes, **layers, **heads)).eval()
    model(input_ids=IDS, labels=IDS).loss.backward()
    experts = model.model.encoder.layers[0].ffn.experts
    used = [name for name in experts if name != "token_dropout" and experts[name].fc1.weight.grad is not None]
    assert used == ["expert_0", "expert_1"]
    with pytest.raises(ValueError, match=r"cannot be replaced: model_type 'nllb-moe' .*: NllbMoeExperts of"):
        replace_moe_blocks(model)
