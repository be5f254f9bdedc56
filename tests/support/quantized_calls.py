"""Calls of operators with quantized stacks, and the same calls with the dequantized matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxmoe import reference
from maxmoe.quantization import FORMATS, QuantizedStack, quantize
from support import matrix_calls
from support.matrix_calls import PROJECTIONS
from support.operator_calls import Call, result
from support.shapes import Shape

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Variant:
    """A format with a dtype of the scales, and for "int4" with a group size and maybe zero points."""

    format: str
    scale_dtype: torch.dtype
    group_size: int = 128
    has_zeros: bool = False

    def __str__(self) -> str:
        name = str(self.scale_dtype).removeprefix("torch.")
        return f"{self.format}-{name}" + (f"-{self.group_size}" + "-zeros" * self.has_zeros) * (self.format == "int4")

    def columns_per_scale(self, columns: int) -> int:
        known = FORMATS[self.format]
        return self.group_size if known.has_groups else known.columns_per_scale or max(1, columns)


VARIANTS = (
    *(
        Variant(name, dtype)
        for name, known in FORMATS.items()
        if not known.has_groups
        for dtype in dict.fromkeys((known.scale_dtypes[0], known.scale_dtypes[-1]))
    ),
    Variant("int4", torch.bfloat16, 32),
    Variant("int4", torch.float16, 64, has_zeros=True),
    Variant("int4", torch.float32, 128, has_zeros=True),
    Variant("int4", torch.float32, 256),
)

# Scales that are zero, subnormal, around the smallest normal number, as small as AVX512-BF16 multiplies without
# subnormals, and the largest.
EDGES = (0.0, 2.0**-149, 2.0**-133, 2.0**-127, 2.0**-126, 1.5 * 2.0**-125, 2.0**-101, 2.0**-100, 1.0, 3.0e38, -0.5)
EDGES_OF_BYTES = {
    "mxfp4": (0, 1, 2, 3, 26, 27, 28, 126, 127, 128, 253, 254),
    "nvfp4": (0, 1, 7, 8, 15, 16, 56, 126, 128, 129, 184, 254),  # 126 is 448, and the last ones are negative
}
BYTES = {"mxfp4": range(116, 125), "nvfp4": range(1, 34)}
EDGES_OF_ROWS = (0.0, 2.0**-149, 2.0**-140, 2.0**-126, 2.0**-109, 2.0**-100, 0.3, -0.7, 7.5e35)


def stack_of(format: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> QuantizedStack:
    """Random weights, quantized: three experts, or as many as the shape has."""
    generator = torch.Generator().manual_seed(0)
    return quantize(torch.randn(shape or (3, 256, 384), generator=generator).to(dtype), format)


def random_scales(variant: Variant, shape: tuple[int, ...], edges: bool) -> Tensor:
    """Scales of weights below 1, or with `edges` each one of EDGES, as far as the dtype has them."""
    if variant.scale_dtype == torch.uint8:
        values = torch.tensor((EDGES_OF_BYTES if edges else BYTES)[variant.format], dtype=torch.uint8)
        return values[torch.randint(len(values), shape)]
    if not edges:
        return (torch.rand(shape).clamp(1 / 256) / FORMATS[variant.format].values[-1]).to(variant.scale_dtype)
    values = torch.tensor(EDGES).to(variant.scale_dtype)
    values = values[values.isfinite()]
    return values[torch.randint(len(values), shape)]


def random_stack(
    variant: Variant,
    sizes: Sequence[int],
    *,
    is_transposed: bool = True,
    edges: bool = False,
    has_nan: bool = False,
) -> QuantizedStack:
    """A stack of shape `sizes` with random bytes, also in the unused half of a last byte."""
    count, rows, columns = (sizes[0], *sizes[:0:-1]) if is_transposed else sizes
    known = FORMATS[variant.format]
    codes = torch.randint(256, (count, rows, known.bytes_per_row(columns)), dtype=torch.uint8)
    if variant.format.startswith("fp8") and not has_nan:
        codes = torch.where(codes % 128 == 127, codes - 1, codes)
    shape = (count, -(-rows // known.rows_per_scale), -(-columns // variant.columns_per_scale(columns)))
    zeros = torch.randint(16, shape, dtype=torch.uint8) if variant.has_zeros else None
    scales, row_scales = random_scales(variant, shape, edges), None
    if known.has_row_scales:
        row_scales = torch.rand(count, rows, 1).clamp(0.01)
        if edges:
            row_scales = torch.tensor(EDGES_OF_ROWS)[torch.randint(len(EDGES_OF_ROWS), (count, rows, 1))]
    return QuantizedStack(
        codes,
        scales,
        format=variant.format,
        zeros=zeros,
        row_scales=row_scales,
        columns=columns,
        is_transposed=is_transposed,
    )


def dequantized(stack: QuantizedStack) -> Tensor:
    """Dequantize a stack by the definition of the format, in float32 and in the layout of the stack."""
    parts = (stack.codes, stack.scales, stack.zeros, stack.row_scales)
    matrices = reference.dequantize(*parts, stack.format, stack.columns, torch.float32)
    return matrices.mT if stack.is_transposed else matrices


def have_same_bits(got: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are the same bit by bit, where NaN is NaN."""
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return False
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[got.dtype.itemsize]
    same = got.contiguous().view(bits) == expected.contiguous().view(bits)
    return bool((same | (got.isnan() & expected.isnan())).all())


def assert_same_bits(call: Call, dtypes: tuple[torch.dtype, ...], what: str = "") -> None:
    """Check that the call has the same outputs and gradients with quantized stacks and with dequantized matrices."""
    stacks = {name: value for name, value in call.arguments.items() if isinstance(value, QuantizedStack)}
    matrices = {name: dequantized(stack) for name, stack in stacks.items()}
    for dtype in dtypes:
        quantized = call.cast(dtype)
        expected = result(quantized.replace(**matrices).cast(dtype), frozen=matrices.keys()).by_name()
        for name, value in result(quantized).by_name().items():
            other = expected[name]
            assert value is not None and other is not None, f"{what}, {dtype}: {name} is {value} instead of {other}"
            assert have_same_bits(value, other), f"{what}, {dtype}: {name}, {(value - other).abs().max()}"


# Every path of the kernels: 1 to 4 rows, up to 12, and more; groups without rows.
ROWS = (0, 1, 2, 3, 4, 5, 8, 12, 13, 30, 70)


def with_stacks(call: Call, variant: Variant, *, edges: bool = False) -> Call:
    """The call with random stacks in the place of its matrices."""
    given = {name: call.arguments[name].shape for name in PROJECTIONS if call.arguments[name] is not None}
    return call.replace(**{name: random_stack(variant, shape, edges=edges) for name, shape in given.items()})


def ffn_call(
    variant: Variant, sizes: tuple[int, int], rows: tuple[int, ...] = ROWS, *, edges: bool = False, **options: Any
) -> Call:
    """expert_ffn for `sizes` (D, F) and an expert for each number of rows."""
    experts = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
    experts = experts[torch.randperm(len(experts))].tolist()
    shape = Shape("grouped", len(experts) // 2, len(rows), 2, *sizes, experts.__getitem__)
    return with_stacks(matrix_calls.ffn_call(shape, **options), variant, edges=edges)
