"""Adapters merged into quantized experts: the codes of PEFT's own merge, quantized again, and what is lost of them."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

pytest.importorskip("transformers")

import maxmoe.integrations.transformers  # registers "maxmoe"
from maxmoe.convert.quantized_merge import MergeLoss, merge_and_unload, merge_losses
from maxmoe.quantization import FORMATS, QuantizedWeight, dequantize_experts
from maxmoe.sharding import Mesh
from support.run_ranks import fake_rank
from support.small_models import blocks_of, model_of

OPTIONS: dict[str, Any] = {"target_modules": [], "init_lora_weights": False}
CONFIG = maxmoe.MoEConfig(hidden_size=40, intermediate_size=33, num_experts=4, top_k=2)


def layers() -> tuple[nn.Module, list[str]]:
    """Matrices [in, out]."""
    return nn.Sequential(maxmoe.MoEFeedForward(CONFIG)), ["experts.up_proj", "experts.down_proj"]


def block() -> tuple[nn.Module, list[str]]:
    """Matrices [out, in]."""
    model: Any = model_of("mixtral")
    model.set_experts_implementation("maxmoe")
    return nn.Sequential(*blocks_of(model).values()), ["experts.gate_up_proj", "experts.down_proj"]


def adapted(make: Any, format: str, alpha: float = 0.5) -> Any:
    torch.manual_seed(0)
    model, names = make()
    model.requires_grad_(False)
    maxmoe.quantize_experts(model, format)
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=alpha, target_parameters=names, **OPTIONS))
    for name in ("other", "unused"):
        model.add_adapter(name, LoraConfig(r=3, target_parameters=names, **OPTIONS))
    model.base_model.set_adapter(["default", "other"])
    return model.double()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in model.named_parameters() if each.dim() == 3}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("make", [layers, block])
def test_the_codes_and_losses_of_a_merge(make: Any, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two active adapters beside a third one; the losses are printed before anything changes."""
    model = adapted(make, format)
    whole, printed = copy.deepcopy(model), []
    dequantize_experts(whole)
    before = weights_of(copy.deepcopy(whole).unload())
    target = weights_of(whole := whole.merge_and_unload())
    maxmoe.quantize_experts(whole.requires_grad_(False), format)
    changed = {name for name in before if not torch.equal(before[name], target[name])}
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def show(losses: Any) -> None:
        printed.append(losses)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    monkeypatch.setattr("builtins.print", show)
    merged = merge_and_unload(model)
    (losses,) = printed
    assert {each.name for each in losses.weights} == changed and len(changed) == len(losses.weights) >= 2
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    for name in changed:
        weight: Any = merged.get_submodule(name)
        expected: Any = whole.get_submodule(name)
        assert isinstance(weight, QuantizedWeight) and weight.description() == expected.description()
        assert all(torch.equal(part, expected.parts()[key]) for key, part in weight.parts().items())
        (loss,) = (each for each in losses.weights if each.name == name)
        after, change = expected.dequantize(), target[name] - before[name]
        values = (
            change.norm() / before[name].norm(),
            (after - target[name]).norm() / change.norm(),
            ((after - before[name]) * change).sum() / change.square().sum(),
        )
        assert loss == MergeLoss(name, format, *(pytest.approx(value.item(), rel=1e-9) for value in values))


def test_the_table_and_adapters_that_change_nothing() -> None:
    model = adapted(layers, "mxfp4", alpha=0.0)
    model.base_model.set_adapter("default")
    *_, heading, _, down, up = str(merge_losses(model)).splitlines()
    assert " ".join(heading.split()) == "weight W format |dW| / |W| lost of dW survives"
    assert [down.split(), up.split()] == [[f"0.experts.{name}", "mxfp4", "0%"] for name in ("down_proj", "up_proj")]


def test_models_without_weights_to_merge() -> None:
    message = "the model must have active adapters beside quantized experts, got "
    with pytest.raises(ValueError, match=message + "Sequential"):
        merge_losses(layers()[0])
    model = adapted(layers, "mxfp4")
    with pytest.raises(ValueError, match="merge_and_unload needs a model of PEFT, got Sequential"):
        merge_and_unload(nn.Sequential(model))
    model.base_model.set_adapter([])
    with pytest.raises(ValueError, match=message + "PeftModel"):
        merge_and_unload(model)
    model.base_model.set_adapter("default")
    with fake_rank(0, 2):
        maxmoe.parallelize(model, Mesh({"expert": 2}), "ep-tp")
        with pytest.raises(ValueError, match=r"^merge_and_unload needs whole tensors, got 0.experts.\w+ as a DTensor"):
            merge_and_unload(model)
