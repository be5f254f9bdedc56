"""Adapters of PEFT merged into quantized experts, and how much of them the quantization takes away."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maxmoe.adapters import unwrapped_name, wrappers_of
from maxmoe.checks.whole_tensors import check_whole
from maxmoe.ops import LowRankFactors
from maxmoe.quantization import FORMATS, QuantizedStack, QuantizedWeight, put_stack, quantize
from maxmoe.text_table import report

__all__ = ["MergeLoss", "MergeLosses", "merge_and_unload", "merge_losses"]


class MergeLoss(NamedTuple):
    """What becomes of the adapters beside a quantized weight W when it is quantized again: Q(W + dW).

    Norms are over all experts. Ratios are NaN for adapters that change nothing, dW = 0.

    Attributes:
        name: path of the weight in the model that PEFT wraps.
        format: name of its format.
        change: ||dW|| / ||W||, size of what the adapters change.
        loss: ||Q(W + dW) - (W + dW)|| / ||dW||, size of the error relative to what the adapters change.
        surviving: <Q(W + dW) - W, dW> / ||dW||^2, part of dW in what has changed: 1 if nothing is lost, 0 if all codes
            stay.
    """

    name: str
    format: str
    change: float
    loss: float
    surviving: float


@dataclass(frozen=True)
class MergeLosses:
    """Losses of all quantized weights with adapters; ``print`` shows them as a table.

    Attributes:
        weights: losses by weight, in the order of the model.
    """

    weights: tuple[MergeLoss, ...]

    def __str__(self) -> str:
        heading = ("weight W", "format", "|dW| / |W|", "lost of dW", "survives")
        rows = [(each.name, each.format, *map(_percent, each[2:])) for each in self.weights]
        text = (
            "Adapters dW merged into quantized weights. Lost: |Q(W + dW) - (W + dW)| / |dW|, the rounding error of the "
            "format, which may be larger than dW. Survives: the part of dW that is in Q(W + dW) - W."
        )
        return report([text, [heading, *rows]])


def _percent(ratio: float) -> str:
    return "" if ratio != ratio else f"{100 * ratio:.3g}%"


@torch.no_grad()
def merge_losses(model: nn.Module) -> MergeLosses:
    """Measure what would be lost of the active adapters beside quantized experts, if they were merged.

    Nothing is changed. Weights are expanded one after the other, to the dtype in which the experts compute.

    Args:
        model: model of PEFT, not sharded, with adapters beside weights of `maxmoe.quantize_experts`.

    Raises:
        ValueError: for a model without such adapters, or with sharded weights.
    """
    return MergeLosses(tuple(_loss(each, _merged(each)) for each in _adapted_weights(model)))


@torch.no_grad()
def merge_and_unload(model: nn.Module) -> nn.Module:
    """Merge the active adapters of a model of PEFT into its weights, quantized experts included.

    Quantized experts are quantized again in their format, as `maxmoe.quantization.quantize` does: the same codes as of
    `dequantize_experts`, PEFT's `merge_and_unload` and `quantize_experts`, with one weight at a time expanded. Weights
    of "int4" have no zero points afterwards. Before anything is changed, `merge_losses` is printed. All else is merged
    by PEFT::

        print(merge_losses(model))  # decide
        model = merge_and_unload(model)

    Args:
        model: model of PEFT, as for `merge_losses`.

    Returns:
        The model without PEFT.

    Raises:
        ValueError: as `merge_losses`, and for another model. Nothing has been changed then.
    """
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise ValueError(f"merge_and_unload needs a model of PEFT, got {type(model).__name__}")
    print(merge_losses(model))
    for each in [*_adapted_weights(model)][::-1]:  # wrappers lie in each other, the first one outside
        put_stack(each.owner, each.parameter, _merged(each))
        parent, _, name = each.path.rpartition(".")
        setattr(model.get_submodule(parent), name, each.wrapper.base_layer)
    unloaded: nn.Module = model.merge_and_unload()
    return unloaded


class _AdaptedWeight(NamedTuple):
    """A quantized weight and the factors of the active adapters beside it, in its layout."""

    path: str  # of the wrapper of PEFT
    wrapper: Any
    owner: nn.Module
    parameter: str
    weight: QuantizedWeight
    factors: LowRankFactors

    def change(self, expert: int) -> Tensor:
        """Return what the adapters add to the matrix of an expert, float64."""
        a, b, scale = self.factors
        return scale * (a[expert].double() @ b[expert].double())


def _adapted_weights(model: nn.Module) -> list[_AdaptedWeight]:
    found = [*_find_adapted_weights(model)]
    if not found:
        raise ValueError(f"the model must have active adapters beside quantized experts, got {type(model).__name__}")
    return found


def _find_adapted_weights(model: nn.Module) -> Iterator[_AdaptedWeight]:
    for path, wrapper in wrappers_of(model):
        weight, owner, parameter = wrapper.get_param(), wrapper.get_base_layer(), wrapper.parameter_name
        active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        if isinstance(weight, QuantizedWeight) and active:
            from maxmoe.adapters import _peft

            check_whole("merge_and_unload", {f"{unwrapped_name(path)}.{parameter}": weight.codes})
            factors = LowRankFactors.side_by_side([_peft.factors_of_adapter(wrapper, name) for name in active])
            yield _AdaptedWeight(path, wrapper, owner, parameter, weight, factors)


def _merged(adapted: _AdaptedWeight) -> QuantizedStack:
    """Return weights plus adapters in the format of the weights."""
    weight, format = adapted.weight, FORMATS[adapted.weight.format]
    whole = weight.dequantize()
    for expert, matrix in enumerate(whole):
        matrix.copy_(matrix.double() + adapted.change(expert))
    group_size = weight.columns_per_scale if format.has_groups else None
    if weight.is_transposed:
        return quantize(whole, weight.format, group_size)
    return quantize(whole.mT, weight.format, group_size).mT


def _loss(adapted: _AdaptedWeight, merged: QuantizedStack) -> MergeLoss:
    weight, name = adapted.weight, f"{unwrapped_name(adapted.path)}.{adapted.parameter}"
    sums = torch.zeros(4, dtype=torch.float64, device=weight.device)
    for expert in range(weight.shape[0]):
        before, after = (stack[expert].dequantize().double() for stack in (weight, merged))
        change, changed = adapted.change(expert), after - before
        products = (before * before, change * change, (changed - change) ** 2, changed * change)
        sums += torch.stack([product.sum() for product in products])
    of_weight, of_change, of_error, in_common = sums
    ratios = ((of_change / of_weight).sqrt(), (of_error / of_change).sqrt(), in_common / of_change)
    return MergeLoss(name, weight.format, *(ratio.item() for ratio in ratios))
