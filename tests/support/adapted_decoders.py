"""Decoders with adapters and quantized experts, the same at every call."""

import re
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from maxmoe import quantize_experts
from maxmoe.adapters import share_outer_factors
from maxmoe.models import DecoderConfig
from maxmoe.quantization import QuantizedWeight
from support.adapted import lora, trained, with_adapter
from support.parallel_decoder import BLOCK, decoder

TARGETS = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]


def add_adapters(model: Any, adapters: tuple[str, ...] = ("default",)) -> PeftModel:
    """Add adapters that are not zero beside the experts, the same at every call."""
    model = with_adapter(model, TARGETS, adapter_name=adapters[0])
    for adapter in adapters[1:]:
        model.add_adapter(adapter, lora(TARGETS, r=2, lora_alpha=1))
    model.base_model.set_adapter(list(adapters))
    return model.to(torch.float64)


def adapted(config: DecoderConfig = BLOCK, adapters: tuple[str, ...] = ("default",)) -> PeftModel:
    return add_adapters(decoder(config), adapters)


def sharing_outer(config: DecoderConfig = BLOCK) -> PeftModel:
    """Adapters of which all experts share the factors of the hidden size."""
    model = add_adapters(decoder(config))
    for name, factor in model.named_parameters():
        factor.data.mul_(0 if "lora_B" in name else 1)  # as new ones, whose outer factors may be replaced
    share_outer_factors(model)
    for factor in trained(model).values():
        nn.init.normal_(factor, std=0.3)
    return model


def quantized(format: str, config: DecoderConfig) -> nn.Module:
    """A decoder with frozen quantized experts; everything else is trained. "int4" has zero points."""
    model = decoder(config)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(not path.endswith(tuple(TARGETS)))
    quantize_experts(model, format, group_size=32 if format == "int4" else None)
    generator = torch.Generator().manual_seed(2)
    for weight in model.modules():
        if isinstance(weight, QuantizedWeight) and format == "int4":
            zeros = torch.randint(16, weight.scales.shape, generator=generator, dtype=torch.uint8)
            weight.zeros = nn.Parameter(zeros, requires_grad=False)
    return model


def quantized_and_adapted(format: str, config: DecoderConfig) -> PeftModel:
    """Also with a trained embedding, so that the gradient passes through all modules."""
    model = add_adapters(quantized(format, config))
    model.base_model.model.embedding.weight.requires_grad_(True)
    return model


def partly_trained(trained: str) -> nn.Module:
    """A decoder of which only the parameters are trained whose names have a pattern."""
    model = decoder(BLOCK)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(trained, name) is not None)
    return model
