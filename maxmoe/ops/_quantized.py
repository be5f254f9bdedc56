"""Quantized stacks as arguments of operators."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake
from maxmoe.quantization import QuantizedStack


def parts_of(stack: QuantizedStack, name: str) -> dict[str, Tensor | str | None]:
    """Return the scales, the zero points and the format of a stack, which operators take beside the codes."""
    if stack.dim() != 3:
        raise ValueError(f"{name} must be a stack of matrices, of shape (L, in, out), got {tuple(stack.shape)}")
    return {"scales": stack.scales, "zeros": stack.zeros, "format": stack.format}


def weights_of(**stacks: Tensor | None) -> dict[str, Tensor | str | None]:
    """Return the arguments of `expert_ffn` for stacks of matrices (L, in, out), quantized or not, by their names."""
    arguments: dict[str, Tensor | str | None] = {}
    for name, stack in stacks.items():
        if not isinstance(stack, QuantizedStack):
            arguments[name] = stack
            continue
        if not stack.is_transposed:
            raise ValueError(
                f"{name} must be quantized in blocks along its inputs, in the rows of stack.mT, got blocks along its "
                f"outputs: use quantize({name}) for matrices (L, in, out)"
            )
        arguments[name] = stack.codes
        arguments |= {f"{name}_{part}": value for part, value in parts_of(stack, name).items()}
    return arguments


@register_fake("dequantize")
def _dequantize_fake(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, format: str, columns: int, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((*codes.shape[:2], columns), dtype=dtype)
