"""What this library knows of PEFT's classes, with every private name that it uses; no other file names one.

PEFT wraps a module for each adapted parameter in a `ParamWrapper`, whose `_activate_lora` adds the product of the
factors to the parameter while the module runs. `lora_A` is packed with the expert as the slowest index, `lora_B` with
the expert as the fastest one. `check_layout` compares this with the product that PEFT computes, so that another layout
of another version of PEFT is found out. Checked with peft 0.21.
"""

import functools
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
    "is_stacked",
    "is_swapped",
    "parameter_of",
    "replace_activation",
    "stacks",
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
    if is_stacked(wrapper):
        raise RuntimeError(
            f"the adapter {adapter!r} beside {wrapper.parameter_name} has been added after parallelize, which has not "
            "sharded it: its gradients would not be reduced. Add or load adapters before parallelize"
        )
    count = wrapper.num_experts
    return (
        lora_a.reshape(count, -1, lora_a.shape[1]),
        lora_b.reshape(lora_b.shape[0], -1, count).permute(2, 1, 0),
    )


def parameter_of(wrapper: Any) -> Tensor:
    """Return the parameter that a wrapper adapts."""
    parameter: Tensor = wrapper.get_param()
    return parameter


def is_swapped(wrapper: Any) -> bool:
    """Return whether `lora_A` belongs to the last dim of the parameter, as for matrices [out, in]."""
    return bool(wrapper._did_swap_in_out_features)


def is_stacked(wrapper: Any) -> bool:
    """Return whether `parallelize` has made stacks of the factors of a wrapper."""
    return "declaration" in vars(wrapper)


def replace_activation(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method that activates the adapters of a wrapper by what `make` returns for it.

    The method that computes the product of packed factors refuses stacks, whose dims it would confuse.
    """
    setattr(ParamWrapper, ACTIVATE, make(getattr(ParamWrapper, ACTIVATE)))
    ParamWrapper.get_delta_weight = _of_packed_factors(ParamWrapper.get_delta_weight)  # type: ignore[method-assign]


def _of_packed_factors(get_delta_weight: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(get_delta_weight)
    def checked(wrapper: Any, adapter_name: str, *arguments: Any, **options: Any) -> Tensor:
        if is_stacked(wrapper):
            raise RuntimeError(
                f"the adapter {adapter_name!r} beside {wrapper.parameter_name} cannot be merged after parallelize: "
                "save it with maxmoe.parallel.adapter_state_dict, and merge it in one process"
            )
        return get_delta_weight(wrapper, adapter_name, *arguments, **options)

    return checked


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
