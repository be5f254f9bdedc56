"""Adapters of PEFT beside the experts of pipeline stages."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe import pipeline, quantize_experts
from maxmoe.adapters import packed_as_by_peft
from maxmoe.models import DecoderConfig
from maxmoe.parallel import token_sharding
from maxmoe.sharding import Mesh
from support.parts import assert_same
from support.run_ranks import run_ranks
from support.sampling import by_default
from support.staged_decoder import DEEPSEEK, NUM_MICRO_BATCHES, TWO_BLOCKS, batch, decoder, loss, micro_batches

TARGETS = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]


def adapted(config: DecoderConfig, format: str | None = None) -> nn.Module:
    """A decoder whose experts have adapters around them; PEFT's wrapper cannot be partitioned."""
    model: Any = decoder(config)
    if format is not None:
        quantize_experts(model.requires_grad_(False), format)
    torch.manual_seed(3)
    options: Any = {"target_modules": [], "target_parameters": TARGETS, "init_lora_weights": False}
    wrapped = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, **options)).to(torch.float64)
    return wrapped.base_model.model


def gradients_of_one_process(config: DecoderConfig, format: str | None = None) -> dict[str, Tensor]:
    model = adapted(config, format)
    for tokens, targets in micro_batches(*batch()):
        output = model(tokens)
        (loss(output, targets) + output.aux_loss).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("sizes", [{"stage": 2}, {"stage": 2, "fsdp": 2}, {"stage": 2, "expert": 2}], ids=str)
def test_a_step_equals_that_of_one_process(sizes: dict[str, int], schedule: str) -> None:
    check_step(sizes, schedule)


@pytest.mark.parametrize("sizes", by_default([{"stage": 2}, {"stage": 2, "fsdp": 2}], [{"stage": 2}]), ids=str)
def test_quantized_experts(sizes: dict[str, int]) -> None:
    check_step(sizes, "1f1b", "nf4")


def check_step(sizes: dict[str, int], schedule: str, format: str | None = None) -> None:
    config = TWO_BLOCKS if schedule == "1f1b" else DEEPSEEK  # one block in each stage
    expected = gradients_of_one_process(config, format)
    assert expected and all("lora_" in name for name in expected)
    size = Mesh.planned(sizes).num_ranks

    def check() -> list[str]:
        mesh = Mesh(sizes)
        options: Any = {"loss": loss, "schedule": schedule, "num_micro_batches": NUM_MICRO_BATCHES}
        run = pipeline(adapted(config, format), mesh, "ep-as-dp", **options)
        part = token_sharding(mesh.within_stage(), "ep-as-dp").slices(batch()[0].shape)
        run.step(*(whole[part] for whole in batch()))
        found = []
        for name, parameter in run.model.named_parameters():
            assert parameter.requires_grad == ("lora_" in name)
            if parameter.requires_grad:
                assert isinstance(parameter.grad, DTensor)
                whole = packed_as_by_peft(name, parameter.grad.full_tensor())
                assert_same(whole, expected[name], name, scale=float(expected[name].abs().max()))
                found.append(name)
        return found

    found = {name for names in run_ranks(check, size) for name in names}
    assert found == expected.keys()
