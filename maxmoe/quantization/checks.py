"""Checks of the tensors of a quantized stack, once, when it is made from them."""

import torch
from torch import Tensor

from maxmoe.quantization.formats import Format

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_parts(format: Format, codes: Tensor, scales: Tensor, zeros: Tensor | None, columns: int) -> None:
    """Raise unless codes, scales and zero points fit the format and each other."""
    _check_codes(format, codes, columns)
    _check_scales(format, codes, scales, columns)
    if zeros is not None:
        _check_zeros(format, scales, zeros)
    devices = {part.device for part in (codes, scales, zeros) if part is not None}
    if len(devices) > 1:
        raise ValueError(f"codes and scales must be on one device, got {codes.device} and {scales.device}")
    if not codes.is_meta:
        check_values(scales, zeros)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise unless quantized weights can be dequantized to a dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float64, float32, bfloat16 or float16, got {dtype}")


def _check_codes(format: Format, codes: Tensor, columns: int) -> None:
    if codes.dtype != torch.uint8 or codes.dim() not in (2, 3):
        raise ValueError(f"codes must be uint8 (L, rows, bytes), got {codes.dtype} {tuple(codes.shape)}")
    wanted = format.bytes_per_row(columns)
    if codes.shape[-1] != wanted:
        raise ValueError(
            f"codes of {format.name} must have {wanted} bytes per row for {columns} columns, got {codes.shape[-1]}"
        )


def _check_scales(format: Format, codes: Tensor, scales: Tensor, columns: int) -> None:
    if scales.dtype not in format.scale_dtypes:
        listed = " or ".join(str(dtype).removeprefix("torch.") for dtype in format.scale_dtypes)
        raise ValueError(f"scales of {format.name} must be {listed}, got {scales.dtype}")
    *experts, rows, _ = codes.shape
    given = tuple(scales.shape)
    per_row = given[-1] if given else 0
    block = format.block_columns(columns, per_row)
    if not block:
        raise ValueError(
            f"scales of {format.name} must be one for each 32, 64, 128, ... of {columns} columns, got {per_row} per row"
        )
    wanted = (*experts, -(-rows // format.rows_per_scale), -(-columns // block))
    if given != wanted:
        raise ValueError(
            f"scales of {format.name} must have shape {wanted} for codes {tuple(codes.shape)}, one for each "
            f"{format.rows_per_scale} x {block} weights, got {given}"
        )


def _check_zeros(format: Format, scales: Tensor, zeros: Tensor) -> None:
    if format.name != "int4":
        raise ValueError(f"zeros must be None for {format.name}: int4 alone has zero points, got {tuple(zeros.shape)}")
    if zeros.dtype != torch.uint8 or zeros.shape != scales.shape:
        raise ValueError(
            f"zeros must be uint8 {tuple(scales.shape)}, as the scales, got {zeros.dtype} {tuple(zeros.shape)}"
        )


def check_values(scales: Tensor, zeros: Tensor | None) -> None:
    """Raise unless all scales are finite and all zero points are codes."""
    is_bad = scales == 255 if scales.dtype == torch.uint8 else ~scales.isfinite()
    if bool(is_bad.any()):
        index = tuple(is_bad.nonzero()[0].tolist())
        value = scales[index].item()
        raise ValueError(f"scales must be finite, got {'255, NaN in E8M0,' if value == 255 else value} at {index}")
    if zeros is not None and bool((zeros > 15).any()):
        raise ValueError(f"zeros must be below 16, got {int(zeros.max())}")
