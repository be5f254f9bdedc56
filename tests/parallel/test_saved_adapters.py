"""Adapters saved on a mesh equal the adapters that PEFT saves in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from maxmoe import MoEConfig, MoEFeedForward, StatsAccumulator
from maxmoe.parallel import adapter_state_dict, parallelize
from maxmoe.sharding import Mesh
from support.run_ranks import run_ranks

CONFIG = MoEConfig(
    hidden_size=16,
    intermediate_size=16,
    num_experts=4,
    top_k=2,
    score_function="sigmoid",
    score_correction_bias=True,
    correction_bias_update_rate=0.1,
)
TARGETS = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]


def base() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(MoEFeedForward(CONFIG))


def adapted(name: str, **options: Any) -> PeftModel:
    config = LoraConfig(r=4, target_parameters=TARGETS, target_modules=[], init_lora_weights=False, **options)
    return get_peft_model(base(), config, adapter_name=name)


@pytest.mark.parametrize("name", ["default", "lora_A", "lora_B"])
def test_adapters_of_any_name(name: str, tmp_path: Path) -> None:
    """With rank * num_experts equal to the hidden size, factors in another order would load without an error."""
    x = torch.randn(2, 3, 16)

    def save() -> None:
        model = parallelize(adapted(name), Mesh({"expert": 1}), "ep-as-dp")
        model.save_pretrained(tmp_path, state_dict=adapter_state_dict(model))

    run_ranks(save, 1)
    folder = tmp_path if name == "default" else tmp_path / name
    loaded = PeftModel.from_pretrained(base(), folder, adapter_name=name)
    assert loaded(x).equal(adapted(name)(x))


def test_buffers_of_modules_that_are_saved_whole(tmp_path: Path) -> None:
    def save() -> torch.Tensor:
        model = parallelize(adapted("default", modules_to_save=["router"]), Mesh({"expert": 1}), "ep-as-dp")
        accumulator = StatsAccumulator(model)
        model(torch.randn(1, 13, 16)).square().mean().backward()
        accumulator.update()
        model.save_pretrained(tmp_path, state_dict=adapter_state_dict(model))
        (bias,) = (buffer for path, buffer in model.named_buffers() if "modules_to_save" in path)
        return bias

    (bias,) = run_ranks(save, 1)
    loaded = PeftModel.from_pretrained(base(), tmp_path)
    (found,) = (buffer for path, buffer in loaded.named_buffers() if "modules_to_save" in path)
    assert found.any() and found.equal(bias)
