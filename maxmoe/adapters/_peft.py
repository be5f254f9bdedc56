"""What this library knows of PEFT's classes, with every private name that it uses; no other file names one.

PEFT wraps a module for each adapted parameter in a `ParamWrapper`, whose `_activate_lora` adds the product of the
factors to the parameter while the module runs. `lora_A` is packed with the expert as the slowest index, `lora_B` with
the expert as the fastest one. `check_layout` compares this with the product that PEFT computes, so that another layout
of another version of PEFT is found out. Checked with peft 0.21.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn

from maxmoe._torch import put_in_place, take_out
from maxmoe.ops import LowRankFactors
from maxmoe.quantization import QuantizedStack, QuantizedWeight

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
    "show_quantized_weights",
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


def parameter_of(wrapper: Any) -> Tensor | QuantizedStack:
    """Return the parameter that a wrapper adapts, or its quantized weight."""
    parameter: Tensor | QuantizedStack = wrapper.get_param()
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
        weight = parameter_of(wrapper)
        if isinstance(weight, QuantizedStack):
            raise RuntimeError(
                f"the adapter {adapter_name!r} beside {wrapper.parameter_name} cannot be added to weights quantized as "
                f"{weight.format}: keep it beside them, or dequantize the weights"
            )
        return get_delta_weight(wrapper, adapter_name, *arguments, **options)

    return checked


def show_quantized_weights() -> None:
    """Let `target_parameters` find quantized weights: PEFT looks for parameters that the module itself has."""
    inject = BaseTuner._inject_parameters

    @functools.wraps(inject)
    def injected(tuner: Any, peft_config: Any, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        with _shown_as_parameters(model):
            return inject(tuner, peft_config, model, *arguments, **options)

    BaseTuner._inject_parameters = injected  # type: ignore[assignment,method-assign]


@contextmanager
def _shown_as_parameters(model: nn.Module) -> Iterator[None]:
    """List each quantized weight among the parameters of its module, as a tensor of its shape without memory."""
    shown = [
        (owner, name, weight)
        for owner in model.modules()
        for name, weight in owner.named_children()
        if isinstance(weight, QuantizedWeight)
    ]
    for owner, name, weight in shown:
        element = torch.empty((), dtype=weight.dtype, device=weight.device)
        put_in_place(owner, name, element.expand(weight.shape))
    try:
        yield
    finally:
        for owner, name, _ in shown:
            take_out(owner, name)


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
