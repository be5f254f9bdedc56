"""The factors of PEFT as stacks: the dim of the adapted matrices that each dim of a factor belongs to."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.parallel import Declaration
from maxmoe.parallel.plan.parameter_sharding import logical_names


class Stack(nn.Module):
    """Matrices [in, out], which PEFT calls transposed, or [out, in]."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        shape, names = ((4, 8), ("embed_moe", "mlp_moe")) if is_transposed else ((8, 4), ("mlp_moe", "embed_moe"))
        self.weight = nn.Parameter(torch.zeros(2, *shape))
        self.declaration = Declaration(logical_names={"weight": ("exp", *names)})


@pytest.mark.parametrize("is_transposed", [True, False])
def test_factors_have_the_names_of_inputs_and_outputs(is_transposed: bool) -> None:
    config = LoraConfig(r=3, target_parameters=["0.weight"], target_modules=[])
    model: Any = get_peft_model(nn.Sequential(Stack(is_transposed)), config)
    names = logical_names(planned_copy(model))
    ends = {name.split(".")[-3]: of_dims for name, of_dims in names.items() if "lora_" in name}
    assert ends == {"lora_A": ("exp", None, "embed_moe"), "lora_B": ("exp", None, "mlp_moe")}
