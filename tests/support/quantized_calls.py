"""Calls of operators with quantized stacks, and the same calls with the dequantized matrices."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import maxmoe
from maxmoe import ops, reference
from maxmoe.quantization import FORMATS, QuantizedStack, quantize
from support.operator_calls import Call, Result, result

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
    sizes: tuple[int, int, int],
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


def with_columns(stack: QuantizedStack, start: int, stop: int) -> QuantizedStack:
    """The stack of these columns, between borders of blocks: codes and scales are views with gaps."""
    bits, block = FORMATS[stack.format].bits, stack.columns_per_scale
    codes = stack.codes[..., start * bits // 8 : -(-stop * bits // 8)]
    of_scales = slice(None) if stack.scales.shape[-1] == 1 else slice(start // block, -(-stop // block))
    changes = {"codes": codes, "columns": stop - start, "row_scales": stack.row_scales}
    return stack.map(lambda part: part[..., of_scales], **changes)


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


def pairs(got: Result, expected: Result) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """The outputs and gradients of two calls by name."""
    outputs = {f"output {n}": each for n, each in enumerate(zip(got.outputs, expected.outputs, strict=True))}
    return outputs | {f"gradient of {name}": (each, expected.gradients[name]) for name, each in got.gradients.items()}


def assert_same_bits(call: Call, dtypes: tuple[torch.dtype, ...], what: str = "") -> None:
    """Check that the call has the same outputs and gradients with quantized stacks and with dequantized matrices."""
    stacks = {name: value for name, value in call.arguments.items() if isinstance(value, QuantizedStack)}
    matrices = {name: dequantized(stack) for name, stack in stacks.items()}
    for dtype in dtypes:
        quantized = call.cast(dtype)
        expected = result(quantized.replace(**matrices).cast(dtype), frozen=matrices.keys())
        for name, (value, other) in pairs(result(quantized), expected).items():
            assert value is not None and other is not None, f"{what}, {dtype}: {name} is {value} instead of {other}"
            assert have_same_bits(value, other), f"{what}, {dtype}: {name}, {(value - other).abs().max()}"


# Every path of the kernels: 1 to 4 rows, up to 12, and more; groups without rows.
ROWS = (0, 1, 2, 3, 4, 5, 8, 12, 13, 30, 70)


def gmm_call(stack: QuantizedStack, rows: tuple[int, ...] = ROWS, rank: int = 0) -> Call:
    """Groups of these numbers of rows, each with a matrix, and two rows of no group."""
    count, hidden_size, width = stack.shape
    arguments = {
        "lhs": torch.randn(sum(rows) + 2, hidden_size, dtype=torch.float64),
        "rhs": stack,
        "group_sizes": torch.tensor(rows, dtype=torch.int64),
        "rhs_bias": torch.randn(count, width, dtype=torch.float64),
    }
    if rank:
        arguments["rhs_factors.a"] = torch.randn(count, hidden_size, rank, dtype=torch.float64)
        arguments["rhs_factors.b"] = torch.randn(count, rank, width, dtype=torch.float64)
    return Call("gmm", arguments)


def ffn_call(
    variant: Variant,
    sizes: tuple[int, int],
    rows: tuple[int, ...] = ROWS,
    *,
    gate: str | None = "separate",
    edges: bool = False,
    **options: Any,
) -> Call:
    """expert_ffn for `sizes` (D, F) and an expert for each number of rows; `gate` is None or a layout."""
    hidden_size, width = sizes
    experts = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
    experts = experts[torch.randperm(len(experts))].view(-1, 2)
    up_width = 2 * width if gate in ("concatenated", "interleaved") else width

    def stack(inner: int, outer: int) -> QuantizedStack:
        return random_stack(variant, (len(rows), inner, outer), edges=edges)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    arguments = {
        "x": random(len(experts), hidden_size),
        "weights": random(*experts.shape),
        "plan": ops.ragged_plan(experts, len(rows)),
        "gate": stack(hidden_size, width) if gate == "separate" else None,
        "up": stack(hidden_size, up_width),
        "down": stack(width, hidden_size),
        "gate_bias": random(len(rows), width) if gate == "separate" else None,
        "up_bias": random(len(rows), up_width),
        "down_bias": random(len(rows), hidden_size),
        "fused_gate": gate if gate in ("concatenated", "interleaved") else None,
    }
    return Call("expert_ffn", {**arguments, **options})


def check_every_format() -> None:
    """Compare products of each format in each dtype, and print the instruction set."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for variant, is_transposed, sizes in itertools.product(VARIANTS, (True, False), ((31, 33), (130, 96))):
        stack = random_stack(variant, (len(ROWS), *sizes), is_transposed=is_transposed, edges=sizes[0] > 100)
        assert_same_bits(gmm_call(stack), DTYPES, f"{variant}, {is_transposed=}, {sizes}")
    for variant in VARIANTS:
        assert_same_bits(ffn_call(variant, (96, 50)), (torch.bfloat16, torch.float32), str(variant))
    print(maxmoe.build_info()["isa"])
