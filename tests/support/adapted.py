"""Adapters of PEFT beside experts, with factors that are not zero, as after some training."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from maxmoe import MoE

EXPERTS = ("gate_proj", "up_proj", "down_proj")
STACKS = ["experts.gate_up_proj", "experts.down_proj"]  # of models of transformers
# Ranks and scales that differ between modules: 2 and 3 / 2 elsewhere.
OTHER_RANKS: dict[str, Any] = {
    "rank_pattern": {"o_proj": 5, "experts.down_proj": 3},
    "alpha_pattern": {"o_proj": 9, "experts.down_proj": 1},
}
WARNINGS = [
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match"),  # PEFT looks for modules
]


class Model(nn.Module):
    """A model around experts or a layer, as PEFT needs it; `inner` is the only module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Tensor:
        out = self.inner(*inputs)
        result: Tensor = out.hidden_states if isinstance(self.inner, MoE) else out
        return result


def lora(targets: Iterable[str], **options: Any) -> LoraConfig:
    """Factors that are not zero beside parameters."""
    defaults: dict[str, Any] = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, "target_modules": []}
    return LoraConfig(target_parameters=list(targets), **defaults | options)


def with_adapter(model: Any, targets: Iterable[str], adapter_name: str = "default", **options: Any) -> PeftModel:
    """Add low-rank factors in float64, the same at every call."""
    torch.manual_seed(4)
    return get_peft_model(model, lora(targets, **options), adapter_name=adapter_name).to(torch.float64)


def adapted(inner: nn.Module, targets: Iterable[str], **options: Any) -> PeftModel:
    """Return a model with LoRA beside parameters of a module."""
    return with_adapter(Model(inner), [f"inner.{name}" for name in targets], **options)


def adapted_layer(layer: MoE, **options: Any) -> PeftModel:
    return adapted(layer, [f"experts.{name}" for name in EXPERTS], **options)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
