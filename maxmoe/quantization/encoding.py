"""Quantization of weights, one expert at a time."""

import torch
from torch import Tensor
from torch.nn import functional

from maxmoe.quantization.formats import DTYPES, Format, check_group_size, format_named
from maxmoe.quantization.stack import QuantizedStack

_ELEMENTS = 2**17  # of the weights that are encoded at a time, in float64


@torch.no_grad()
def quantize(weights: Tensor, format: str, group_size: int | None = None) -> QuantizedStack:
    """Quantize a stack of matrices.

    Each weight becomes the code with the nearest value, with ties to even codes; the largest magnitude of a block
    determines its scale. "mxfp4": 2^(floor(log2(max)) - 2), as in the OCP Microscaling specification, with larger
    weights saturated. E4M3: max / 448. "int4": max / 7.5, as in compressed-tensors, without zero points. "int8":
    max / 127. "nf4": max. "nvfp4": max / 6 divided by the scale of the row, which is the max of the matrix / (6 * 448).
    The additional memory beside the result is a part of one expert.

    Args:
        weights: ``(L, in, out)``, floating, finite in float32.
        format: "mxfp4", "nvfp4", "fp8_block", "fp8_row", "int4", "int8" or "nf4".
        group_size: number of weights of one output that share a scale, for "int4": 32, 64, 128, ...; 128 by default.

    Returns:
        ``(L, in, out)``, dtype of weights, quantized along in, and stored transposed, one output after the other.
        The scales of "int4" are bfloat16 or float16 if the weights are.

    Raises:
        ValueError: for weights that are not finite, an unknown format, and a group size that the format does not have.
    """
    known = format_named(format)
    if not isinstance(weights, Tensor):
        raise TypeError(f"weights must be a tensor (L, in, out), got {type(weights).__name__}")
    if weights.dim() != 3 or weights.dtype not in DTYPES:
        raise ValueError(f"weights must be floating (L, in, out), got {weights.dtype} {tuple(weights.shape)}")
    if group_size is not None and not known.has_groups:
        raise ValueError(f"group_size must be None for {known.name}: int4 alone has one, got {group_size!r}")
    num_experts, columns, rows = weights.shape
    group, scale_dtype = known.block_columns(columns, 0), known.scale_dtypes[0]
    if known.has_groups:
        group = 128 if group_size is None else group_size
        check_group_size(group)
        scale_dtype = weights.dtype if weights.dtype in known.scale_dtypes else scale_dtype
    of_codes, of_scales = known.shapes(rows, columns, group)
    stack = QuantizedStack(
        weights.new_zeros((num_experts, *of_codes), dtype=torch.uint8),
        weights.new_zeros((num_experts, *of_scales), dtype=scale_dtype),
        row_scales=weights.new_ones((num_experts, rows, 1), dtype=torch.float32) if known.has_row_scales else None,
        format=format,
        columns=columns,
        is_transposed=True,
        dtype=weights.dtype,
    )
    if weights.is_meta or not weights.numel():
        return stack
    slab = known.rows_per_scale * max(1, _ELEMENTS // max(1, known.rows_per_scale * stack.columns))
    for expert in range(len(weights)):
        matrix = weights[expert].mT
        of_rows = None
        if stack.row_scales is not None:
            of_rows = stack.row_scales[expert].fill_(_row_scale(matrix, known))[0]
        for begin in range(0, stack.rows, slab):
            codes, scales = _encode(matrix[begin : begin + slab], known, group, stack.scales.dtype, of_rows)
            stack.codes[expert, begin : begin + slab] = codes
            first = begin // known.rows_per_scale
            stack.scales[expert, first : first + len(scales)] = scales
    return stack


def _row_scale(matrix: Tensor, format: Format) -> float:
    """Return the scale of all rows of a matrix: its largest magnitude becomes the largest code and scale."""
    largest = max(abs(each.item()) for each in matrix.aminmax())
    tiny = torch.finfo(torch.float32).tiny
    return max(largest / format.reach / torch.finfo(torch.float8_e4m3fn).max, tiny)


def _encode(
    matrix: Tensor, format: Format, group: int, scale_dtype: torch.dtype, row_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the codes, packed, and the scales of a matrix ``(rows, columns)``, whose rows have one scale, if any."""
    rows, columns = matrix.shape
    # Quotients of numbers with 24 bits or less never round to a tie in float64.
    wide = functional.pad(matrix.double(), (0, -columns % group, 0, -rows % format.rows_per_scale))
    blocks = wide.view(-1, format.rows_per_scale, wide.shape[1] // group, group)
    largest = blocks.abs().amax(dim=(1, 3))
    is_small = largest <= torch.finfo(torch.float32).max  # False for NaN
    if not bool(is_small.all()):
        raise ValueError(f"weights must be finite in float32, got {largest[~is_small][0].item()}")
    scales, factors = _scales(largest, format, scale_dtype, row_scale)
    codes = _codes(blocks / factors[:, None, :, None], format)
    codes = codes.flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return (codes if format.bits == 8 else _packed(codes, format)), scales


def _scales(largest: Tensor, format: Format, dtype: torch.dtype, row_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the scales for the largest magnitudes of blocks, and what codes are multiplied by, in float64."""
    if format.scale_bytes == "E8M0":
        _, exponents = torch.frexp(largest)  # magnitude in [0.5, 1) * 2^exponent; E2M1 reaches up to 6 = 1.5 * 2^2
        exponents = (exponents - 1 - 2).clamp(-127, 127).masked_fill(largest == 0, -127)
        return (exponents + 127).to(torch.uint8), torch.ldexp(torch.ones_like(largest), exponents)
    dtype = torch.float8_e4m3fn if format.scale_bytes == "E4M3" else dtype
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # subnormal; a scale of zero would divide by zero
    wanted = largest / format.reach if row_scale is None else largest / format.reach / row_scale.double()
    scales = wanted.clamp(smallest, torch.finfo(dtype).max).to(dtype)
    if row_scale is None:
        return scales, scales.double()
    return scales.view(torch.uint8), (scales.float() * row_scale).double()


def _codes(values: Tensor, format: Format) -> Tensor:
    """Return the codes of values that have been divided by their scale."""
    if isinstance(format.values, range):
        integers = values.round().clamp(format.values[0], format.values[-1]) + format.offset
        return integers.to(torch.int16).bitwise_and(2**format.bits - 1).to(torch.uint8)
    if format.signed_values:
        return _nearest(values, format.values)
    sign = values.signbit().to(torch.uint8) << (format.bits - 1)
    return _nearest(values.abs(), format.values) | sign


def _nearest(values: Tensor, table: tuple[float, ...]) -> Tensor:
    """Return the index of the nearest number of an ascending table, with ties to even indices."""
    numbers = torch.tensor(table, dtype=torch.float64, device=values.device)
    middles = (numbers[1:] + numbers[:-1]) / 2
    # A value that equals a bound gets the lower index. Where that is odd, the bound is below the middle.
    below = torch.nextafter(middles, torch.full_like(middles, -torch.inf))
    bounds = torch.where(torch.arange(len(middles), device=values.device) % 2 == 1, below, middles)
    return torch.bucketize(values.contiguous(), bounds, out_int32=True).to(torch.uint8)


def _packed(codes: Tensor, format: Format) -> Tensor:
    """Return codes of 4 bits, two in each byte."""
    codes = functional.pad(codes, (0, codes.shape[1] % 2))
    even, odd = codes[:, 0::2], codes[:, 1::2]
    low, high = (even, odd) if format.low_nibble_first else (odd, even)
    return low | high << 4
