"""Specification of the formats of quantized weights, from their published definitions."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Source: QLoRA, Dettmers et al. 2023 (arXiv:2305.14314), appendix E.
_NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def _float(exponent_bits: int, mantissa_bits: int) -> Callable[[int], float]:
    """Return the value of a code of sign, exponent and mantissa; an exponent of zero is subnormal."""
    bias = 2 ** (exponent_bits - 1) - 1

    def value(code: int) -> float:
        sign: float = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
        exponent = code >> mantissa_bits & 2**exponent_bits - 1
        fraction = (code & 2**mantissa_bits - 1) / 2**mantissa_bits
        if exponent == 0:
            return sign * math.ldexp(fraction, 1 - bias)
        return sign * math.ldexp(1 + fraction, exponent - bias)

    return value


def _e4m3(code: int) -> float:
    """Return the value of a code of the OCP 8-bit floating-point formats: no infinity."""
    return math.nan if code % 128 == 127 else _float(4, 3)(code)


class _Format(NamedTuple):
    """Values of codes and of scales of one byte, sizes of a block, and whether the first code is in the high half."""

    bits: int
    value: Callable[[int], float]
    columns: int | None  # None for the whole row
    rows: int = 1
    high_first: bool = False
    scale: Callable[[int], float] | None = None


_ANY_GROUP = -1  # the smallest group size with the number of scales
_FORMATS = {
    # E2M1 of the OCP Microscaling formats: no infinity, no NaN
    "mxfp4": _Format(4, _float(2, 1), 32, scale=lambda byte: 2.0 ** (byte - 127)),
    "nvfp4": _Format(4, _float(2, 1), 16, scale=_e4m3),
    "nf4": _Format(4, lambda code: _NF4[code], 64, high_first=True),
    "int4": _Format(4, float, _ANY_GROUP),
    "int8": _Format(8, lambda code: float(code - 256 if code >= 128 else code), None),  # two's complement
    "fp8_row": _Format(8, _e4m3, None),
    "fp8_block": _Format(8, _e4m3, 128, rows=128),
}


def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    format: str,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the weights ``(..., rows, columns)``: the float32 product of code - zero and scale, rounded to the dtype.

    The scale is the float32 product of the scale of a block and the scale of its row, if there are any.

    Args:
        codes: ``(..., rows, bytes)``, uint8. Of two codes in a byte, the first is in the low half, in the high half for
            "nf4".
        scales: ``(..., row blocks, column blocks)``; uint8 for "mxfp4", 2^(byte - 127), and for "nvfp4", E4M3.
        zeros: zero point of each block; None for 8 with "int4", and for 0 with the other formats.
        row_scales: ``(..., rows, 1)``, float32, for "nvfp4"; otherwise None.
        format: name of the format.
        columns: number of columns.
        dtype: dtype of the result.
    """
    if codes.dim() == 3:  # one matrix at a time, because the products are float32
        parts = []
        for expert in range(len(codes)):
            zero, row_scale = (None if each is None else each[expert] for each in (zeros, row_scales))
            parts.append(dequantize(codes[expert], scales[expert], zero, row_scale, format, columns, dtype))
        return torch.stack(parts) if parts else codes.new_empty((0, codes.shape[1], columns), dtype=dtype)
    rows, known = codes.shape[0], _FORMATS[format]
    if known.bits == 4:
        low, high = codes & 15, codes >> 4
        pair = (high, low) if known.high_first else (low, high)
        codes = torch.stack(pair, dim=-1).flatten(1)[:, :columns]
    table = torch.tensor([known.value(code) for code in range(2**known.bits)])
    values = table.to(codes.device)[codes.int()]
    if format == "int4":
        values = values - (8 if zeros is None else _spread(zeros.float(), known, rows, columns))
    factors = scales.float()
    if known.scale is not None:
        factors = torch.tensor([known.scale(byte) for byte in range(256)]).to(scales.device)[scales.int()]
    if row_scales is not None:
        factors = factors * row_scales
    return (values * _spread(factors, known, rows, columns)).to(dtype)


def _spread(blocks: Tensor, format: _Format, rows: int, columns: int) -> Tensor:
    """Return the number of each weight's block ``(rows, columns)``; the last block may be shorter."""
    width = format.columns or max(1, columns)
    if width == _ANY_GROUP:
        width = next(2**n for n in range(5, 64) if -(-columns // 2**n) <= blocks.shape[1])
    return blocks.repeat_interleave(format.rows, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
