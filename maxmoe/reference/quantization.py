"""Specification of the formats of quantized weights, from their published definitions."""

import math

import torch
from torch import Tensor

# Source: QLoRA, Dettmers et al. 2023 (arXiv:2305.14314), appendix E.
_NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
_FOUR_BITS = ("mxfp4", "int4", "nf4")


def code_value(code: int, format: str) -> float:
    """Return the value of a code, without zero point and scale."""
    match format:
        case "mxfp4":  # E2M1 of the OCP Microscaling formats: no infinity, no NaN
            return _float(code, exponent_bits=2, mantissa_bits=1)
        case "fp8_block" | "fp8_row":  # E4M3 of the OCP 8-bit floating-point formats: no infinity
            return math.nan if code % 128 == 127 else _float(code, exponent_bits=4, mantissa_bits=3)
        case "nf4":
            return _NF4[code]
        case "int4":
            return float(code)
        case "int8":  # two's complement
            return float(code - 256 if code >= 128 else code)
        case _:
            raise ValueError(f"format {format!r} is not known")


def _float(code: int, *, exponent_bits: int, mantissa_bits: int) -> float:
    """Return the value of sign, exponent and mantissa; an exponent of zero is subnormal."""
    sign: float = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & 2**exponent_bits - 1
    fraction = (code & 2**mantissa_bits - 1) / 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - bias)
    return sign * math.ldexp(1 + fraction, exponent - bias)


def dequantize(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, format: str, columns: int, dtype: torch.dtype
) -> Tensor:
    """Return the weights ``(..., rows, columns)``: the float32 product of code - zero and scale, rounded to the dtype.

    Args:
        codes: ``(..., rows, bytes)``, uint8. Of two codes in a byte, the first is in the low half, in the high half for
            "nf4".
        scales: ``(..., row blocks, column blocks)``; uint8 for "mxfp4": 2^(byte - 127).
        zeros: zero point of each block; None for 8 with "int4", and for 0 with the other formats.
        format: name of the format.
        columns: number of columns.
        dtype: dtype of the result.
    """
    if codes.dim() == 3:  # one matrix at a time, because the products are float32
        parts = [
            dequantize(codes[expert], scales[expert], None if zeros is None else zeros[expert], format, columns, dtype)
            for expert in range(len(codes))
        ]
        return torch.stack(parts) if parts else codes.new_empty((0, codes.shape[1], columns), dtype=dtype)
    rows = codes.shape[0]
    if format in _FOUR_BITS:
        low, high = codes & 15, codes >> 4
        pair = (high, low) if format == "nf4" else (low, high)
        codes = torch.stack(pair, dim=-1).flatten(1)[:, :columns]
    table = torch.tensor([code_value(code, format) for code in range(16 if format in _FOUR_BITS else 256)])
    values = table.to(codes.device)[codes.int()]
    if format == "int4":
        values = values - (8 if zeros is None else _spread(zeros.float(), format, rows, columns))
    factors = scales.float() if format != "mxfp4" else torch.pow(2.0, scales.double() - 127).float()
    return (values * _spread(factors, format, rows, columns)).to(dtype)


def _spread(blocks: Tensor, format: str, rows: int, columns: int) -> Tensor:
    """Return the number of each weight's block ``(rows, columns)``; the last block may be shorter."""
    height = 128 if format == "fp8_block" else 1
    match format:
        case "mxfp4":
            width = 32
        case "nf4":
            width = 64
        case "fp8_block":
            width = 128
        case "int4":  # the smallest group size with this number of blocks
            width = next(2**n for n in range(5, 64) if -(-columns // 2**n) <= blocks.shape[1])
        case _:  # the whole row
            width = max(1, columns)
    return blocks.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
