"""What this library knows of PEFT's classes, with every private name that it uses; no other file names one.

PEFT wraps a module for each adapted parameter in a `ParamWrapper`, whose `_activate_lora` adds the product of the
factors to the parameter while the module runs. `lora_A` is packed with the expert as the slowest index, `lora_B` with
the expert as the fastest one. `check_layout` compares this with the product that PEFT computes, so that another layout
of another version of PEFT is found out. Checked with peft 0.21.
"""

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from maxmoe.ops import LowRankFactors

ACTIVATE = "_activate_lora"

__all__ = [
    "ACTIVATE",
    "ParamWrapper",
    "check_layout",
    "factors_of_adapter",
    "is_swapped",
    "parameter_of",
    "replace_activation",
    "stacks",
    "trained_factors",
]


def factors_of_adapter(wrapper: Any, adapter: str) -> LowRankFactors:
    """Return the factors of an adapter in the layout of the parameter: parameter + scale * a b.

    On a mesh, the factors are stacks with the experts of this rank: see `maxmoe.parallel`.
    """
    lora_a, lora_b = stacks(wrapper, adapter)
    scale = float(wrapper.scaling[adapter])
    if is_swapped(wrapper):
        return LowRankFactors(lora_b.transpose(1, 2), lora_a, scale)
    return LowRankFactors(lora_a.transpose(1, 2), lora_b, scale)


def stacks(wrapper: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """Return `lora_A` as ``(L, r, in)`` and `lora_B` as ``(L, r, out)``."""
    lora_a, lora_b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    if lora_a.dim() == 3:
        return lora_a, lora_b
    count = wrapper.num_experts
    return (
        lora_a.reshape(count, -1, lora_a.shape[1]),
        lora_b.reshape(lora_b.shape[0], -1, count).permute(2, 1, 0),
    )


def trained_factors(wrapper: Any) -> list[Tensor]:
    """Return the trained factors of all adapters of a wrapper."""
    owners = (*wrapper.lora_A.values(), *wrapper.lora_B.values())
    return [owner.weight for owner in owners if owner.weight.requires_grad]


def parameter_of(wrapper: Any) -> Tensor:
    """Return the parameter that a wrapper adapts."""
    parameter: Tensor = wrapper.get_param()
    return parameter


def is_swapped(wrapper: Any) -> bool:
    """Return whether `lora_A` belongs to the last dim of the parameter, as for matrices [out, in]."""
    return bool(wrapper._did_swap_in_out_features)


def replace_activation(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method that activates the adapters of a wrapper by what `make` returns for it."""
    setattr(ParamWrapper, ACTIVATE, make(getattr(ParamWrapper, ACTIVATE)))


class _Stack(nn.Module):
    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.weight = nn.Parameter(torch.zeros(2, 3, 4))


def check_layout() -> None:
    """Raise if the product of the factors is not what PEFT adds to a parameter."""
    config = LoraConfig(r=2, lora_alpha=3, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for is_transposed in (True, False):
            wrapper: Any = ParamWrapper(_Stack(is_transposed), "default", "weight", config, r=2, lora_alpha=3)
            a, b, scale = factors_of_adapter(wrapper, "default")
            expected = wrapper.get_delta_weight("default")
            if not torch.allclose(scale * a @ b, expected, atol=1e-6):
                raise RuntimeError("the product of the factors differs from get_delta_weight")
