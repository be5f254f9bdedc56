"""What this library changes in PEFT's classes, with every private name that it uses; no other file names one.

PEFT wraps a module for each adapted parameter in a `ParamWrapper`, whose `_activate_lora` adds the product of the
factors to the parameter while the module runs. `lora_A` is packed with the expert as the slowest index, `lora_B` with
the expert as the fastest one. `check_layout` compares this with the product that PEFT computes, so that another layout
of another version of PEFT is found out. Checked with peft 0.21.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn

from maxmoe._torch import parameter_table
from maxmoe.adapters.factors import hand_over, takes
from maxmoe.adapters.stacked import stacked_from_peft
from maxmoe.ops import LowRankFactors
from maxmoe.quantization import QuantizedStack, QuantizedWeight


def replace_methods() -> None:
    """Let wrappers hand their factors over, and `target_parameters` find quantized weights."""
    replaced: tuple[tuple[type[Any], str, Callable[..., Any]], ...] = (
        (ParamWrapper, "_activate_lora", _or_hand_over),
        (ParamWrapper, "get_delta_factors", _of_expanded_factors),
        (ParamWrapper, "get_delta_weight", _of_packed_factors),
        (BaseTuner, "_inject_parameters", _with_quantized_weights),
    )
    for owner, name, make in replaced:
        method = getattr(owner, name)
        setattr(owner, name, functools.wraps(method)(make(method)))


def _or_hand_over(activate: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
    def activated(wrapper: Any, active_adapters: list[str]) -> AbstractContextManager[None]:
        """Hand the factors over to a module that takes them, or else call `activate`."""
        adapters = [adapter for adapter in active_adapters if adapter in wrapper.lora_A]
        module, name = wrapper.get_base_layer(), wrapper.parameter_name
        if not adapters or not takes(module, name):
            return activate(wrapper, active_adapters)
        factors = [factors_of_adapter(wrapper, adapter) for adapter in adapters]
        return hand_over(module, name, LowRankFactors.side_by_side(factors))

    return activated


def _of_expanded_factors(_get_delta_factors: Callable[..., Any]) -> Callable[..., Any]:
    def expanded(wrapper: Any, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """Return the factors in the layout of the parameter; `get_delta_factors` cannot read shared ones."""
        a, b, scale = factors_of_adapter(wrapper, adapter_name)
        dtype = wrapper.get_param().dtype
        return a.to(dtype), b.to(dtype), scale

    return expanded


def _of_packed_factors(get_delta_weight: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checked(wrapper: Any, adapter_name: str, *arguments: Any, **options: Any) -> Tensor:
        """Refuse stacks, whose dims the method would confuse, and quantized weights, to which nothing can be added."""
        beside, weight = f"the adapter {adapter_name!r} beside {wrapper.parameter_name}", wrapper.get_param()
        if is_stacked(wrapper):
            raise RuntimeError(
                f"{beside} cannot be merged after parallelize: save it with maxmoe.parallel.adapter_state_dict, and "
                "merge it in one process"
            )
        if isinstance(weight, QuantizedStack):
            raise RuntimeError(
                f"{beside} cannot be added to weights quantized as {weight.format}: keep it beside them, quantize the "
                "sum with maxmoe.convert.quantized_merge.merge_and_unload(model), which says how much of it is lost, "
                "or call maxmoe.quantization.dequantize_experts(model) first"
            )
        if len({*map(len, stored_stacks(wrapper, adapter_name))}) == 1:
            return get_delta_weight(wrapper, adapter_name, *arguments, **options)
        a, b, scale = factors_of_adapter(wrapper, adapter_name)
        return (scale * a @ b).to(weight.dtype)

    return checked


def _with_quantized_weights(inject: Callable[..., Any]) -> Callable[..., Any]:
    def injected(tuner: Any, peft_config: Any, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        """List each quantized weight among the parameters of its module, as a tensor of its shape without memory.

        PEFT looks for parameters that the module itself has.
        """
        shown = [
            (owner, name, weight)
            for owner in model.modules()
            for name, weight in owner.named_children()
            if isinstance(weight, QuantizedWeight)
        ]
        for owner, name, weight in shown:
            element = torch.empty((), dtype=weight.dtype, device=weight.device)
            parameter_table(owner)[name] = element.expand(weight.shape)
        try:
            return inject(tuner, peft_config, model, *arguments, **options)
        finally:
            for owner, name, _ in shown:
                del parameter_table(owner)[name]

    return injected


def factors_of_adapter(wrapper: Any, adapter: str) -> LowRankFactors:
    """Return the factors of an adapter in the layout of the parameter: parameter + scale * a b.

    On a mesh, the factors are stacks with the experts of this rank: see `maxmoe.parallel`.
    """
    lora_a, lora_b = stacks(wrapper, adapter)
    factors = LowRankFactors(lora_a.transpose(1, 2), lora_b, float(wrapper.scaling[adapter]))
    return factors.transposed() if is_swapped(wrapper) else factors


def stacks(wrapper: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """Return `lora_A` as ``(L, r, in)`` and `lora_B` as ``(L, r, out)``, with views of a factor that experts share."""
    lora_a, lora_b = stored_stacks(wrapper, adapter)
    count = max(len(lora_a), len(lora_b))
    return lora_a.expand(count, -1, -1), lora_b.expand(count, -1, -1)


def stored_stacks(wrapper: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """Return the two factors as stacks, with one matrix if the experts share it."""
    lora_a, lora_b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    if lora_a.dim() == 3:
        return lora_a, lora_b
    if is_stacked(wrapper):
        raise RuntimeError(
            f"the adapter {adapter!r} beside {wrapper.parameter_name} has been added after parallelize, which has not "
            "sharded it: its gradients would not be reduced. Add or load adapters before parallelize"
        )
    rank = wrapper.r[adapter]
    return stacked_from_peft("lora_A", lora_a, rank), stacked_from_peft("lora_B", lora_b, rank)


def is_swapped(wrapper: Any) -> bool:
    """Return whether `lora_A` belongs to the last dim of the parameter, as for matrices [out, in]."""
    return bool(wrapper._did_swap_in_out_features)


def is_stacked(wrapper: Any) -> bool:
    """Return whether the factors of a wrapper are stacks: on a mesh."""
    return "declaration" in vars(wrapper)


def check_layout() -> None:
    """Raise if the product of the factors is not what PEFT adds to a parameter."""
    config = LoraConfig(r=2, lora_alpha=3, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for is_transposed in (True, False):
            stack: Any = nn.Module()
            stack.is_transposed = is_transposed
            stack.weight = nn.Parameter(torch.zeros(2, 3, 4, dtype=torch.float64))  # the dtype of the adapters, too
            wrapper: Any = ParamWrapper(stack, "default", "weight", config, r=2, lora_alpha=3)
            a, b, scale = factors_of_adapter(wrapper, "default")
            expected = wrapper.get_delta_weight("default")
            if not torch.allclose(scale * a @ b, expected, atol=1e-6):
                raise RuntimeError("the product of the factors differs from get_delta_weight")
