"""Quantized stacks as operands of gmm and expert_ffn: the same bits as with dequantized matrices."""

import os
import sys
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

import maxmoe
from maxmoe import reference
from maxmoe.quantization import FORMATS, QuantizedStack, quantize
from support import matrix_calls, programs
from support.activations import SITU
from support.matrix_calls import RANKS, factored_gmm_call, gmm_call, with_factors
from support.operator_calls import Call
from support.operator_checks import AutogradTests
from support.quantized_calls import (
    DTYPES,
    ROWS,
    VARIANTS,
    Variant,
    assert_same_bits,
    ffn_call,
    have_same_bits,
    random_stack,
)
from support.shapes import Shape

each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
each_orientation = pytest.mark.parametrize("is_transposed", [True, False], ids=["transposed", "plain"])
BFLOAT16 = (torch.bfloat16,)


@pytest.fixture
def num_threads() -> int:
    """Run on one thread; test_bits_do_not_depend_on_threads compares it with more."""
    return 1


@each_variant
@pytest.mark.parametrize("edges", [False, True], ids=["plain", "edges"])
def test_dequantize(path: str, variant: Variant, edges: bool) -> None:
    """Random bytes contain all codes."""
    for rows, columns in ((1, 1), (3, 17), (200, 130), (129, 257), (1, 2880)):
        stack = random_stack(variant, (1, rows, columns), is_transposed=False, edges=edges, has_nan=True)
        parts = (stack.codes, stack.scales, stack.zeros, stack.row_scales, stack.format, columns)
        expected = reference.dequantize(*parts, torch.float32)
        for dtype in DTYPES:
            got = torch.ops.maxmoe.dequantize(*parts, dtype)
            assert have_same_bits(got, expected.to(dtype)), (rows, columns, dtype)
            assert have_same_bits(stack.mT.dequantize(dtype), got.mT)


SIZES = ((1, 17), (31, 33), (96, 130), (130, 96), (200, 257))
FEW_GROUPS = (2, 9, 18)


@each_variant
@each_orientation
def test_gmm(variant: Variant, is_transposed: bool) -> None:
    for number, (sizes, edges) in enumerate(product(SIZES, (False, True))):
        rows = ROWS if sizes[0] < 100 else FEW_GROUPS
        stack = random_stack(variant, (len(rows), *sizes), is_transposed=is_transposed, edges=edges, has_nan=edges)
        dtypes = (torch.bfloat16, DTYPES[number % 4]) if number % 4 != 2 else BFLOAT16
        assert_same_bits(gmm_call(rows, stack), dtypes, f"{sizes}, {edges=}")


# The kernels differ up to four rows, up to twelve, and by the remainder of larger numbers.
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 12, 13, 16, 17, 31])
def test_gmm_of_any_number_of_rows(rows: int) -> None:
    for variant, is_transposed in product(VARIANTS, (True, False)):
        stack = random_stack(variant, (1, 40, 67), is_transposed=is_transposed)
        assert_same_bits(gmm_call((rows,), stack), (torch.bfloat16, torch.float32), f"{variant}, {is_transposed=}")


@pytest.mark.parametrize(
    ("variant", "sizes"), [*zip(VARIANTS, cycle([(2880, 34), (34, 2880), (4131, 33)]), strict=False)], ids=str
)
def test_gmm_of_several_blocks(variant: Variant, sizes: tuple[int, int]) -> None:
    """Without and with a subnormal scale in one block."""
    for is_transposed in (True, False):
        stack = random_stack(variant, (3, *sizes), is_transposed=is_transposed)
        assert_same_bits(gmm_call(FEW_GROUPS, stack), BFLOAT16, f"{is_transposed=}")
        stack.scales[:, -1, 0] = 0 if variant.scale_dtype == torch.uint8 else 2.0**-130
        assert_same_bits(gmm_call(FEW_GROUPS, stack), (BFLOAT16[0], DTYPES[is_transposed]), f"{is_transposed=}, edge")


@each_variant
@each_orientation
def test_gmm_with_factors(variant: Variant, is_transposed: bool) -> None:
    for rank, sizes in ((1, (33, 31)), (8, (96, 130))):
        stack = random_stack(variant, (len(ROWS), *sizes), is_transposed=is_transposed)
        assert_same_bits(gmm_call(ROWS, stack, rank), (torch.bfloat16, torch.float32), str(sizes))


def with_columns(stack: QuantizedStack, start: int, stop: int) -> QuantizedStack:
    """The stack of these columns, between borders of blocks: codes and scales are views with gaps."""
    bits, block = FORMATS[stack.format].bits, stack.columns_per_scale
    codes = stack.codes[..., start * bits // 8 : -(-stop * bits // 8)]
    of_scales = slice(None) if stack.scales.shape[-1] == 1 else slice(start // block, -(-stop // block))
    changes = {"codes": codes, "columns": stop - start, "row_scales": stack.row_scales}
    return stack.map(lambda part: part[..., of_scales], **changes)


@each_variant
@each_orientation
def test_gmm_of_slices(variant: Variant, is_transposed: bool) -> None:
    """Slices with a step, and of rows and columns at borders of blocks: codes and scales are not contiguous."""
    stack = random_stack(variant, (6, 300, 390))
    border = min(max(variant.columns_per_scale(300), 32), 256)
    is_row = variant.columns_per_scale(300) == 300
    parts = [
        stack[1::2],
        stack[:3][..., 128:256],
        with_columns(stack[2:5], border, 300),
        with_columns(stack[-3:], 0, 77 if is_row else border)[..., 256:],
    ]
    for number, part in enumerate(parts):
        part = part if is_transposed else part.mT
        assert part.shape[0] == 3 and part.codes.data_ptr() >= stack.codes.data_ptr()
        assert_same_bits(gmm_call(FEW_GROUPS, part), (torch.bfloat16, DTYPES[number]), str(tuple(part.shape)))


def test_strided_codes_and_scales(path: str) -> None:
    stack = random_stack(Variant("int4", torch.bfloat16, 32), (3, 96, 40))
    codes = torch.zeros(3, 40, 2 * stack.codes.shape[2], dtype=torch.uint8)
    codes[..., ::2] = stack.codes
    scales = stack.scales.mT.contiguous().mT
    other = QuantizedStack(codes[..., ::2], scales, format="int4", columns=96, is_transposed=True)
    one = random_stack(Variant("int4", torch.bfloat16, 32), (1, 96, 40))
    same = QuantizedStack(
        one.codes.expand(3, -1, -1), one.scales.expand(3, -1, -1), format="int4", columns=96, is_transposed=True
    )
    for strided in (other, same):
        assert_same_bits(gmm_call((2, 7, 17), strided), (torch.bfloat16, torch.float32))


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"gated": False},
    *({"fused_gate": each} for each in ("concatenated", "interleaved")),
]


@each_variant
def test_expert_ffn(variant: Variant) -> None:
    """Each format with two layouts of the gate, each of them with two of the options."""
    number = VARIANTS.index(variant)
    for gate, first in ((LAYOUTS[number % 4], 0), (LAYOUTS[(number + 1) % 4], 2)):
        has_gate = gate.get("gated", True)
        options: list[dict[str, Any]] = [
            {},
            {"recompute": True, "weights": None, **(SITU if has_gate else {"activation": "gelu_tanh"})},
            {"edges": True, "recompute": True, "activation": "relu2", "up_bias": None, "gate_bias": None},
            {"edges": True, "limit": 0.5 if has_gate else None, "activation": "swigluoai" if has_gate else "gelu"},
        ]
        for each, sizes in enumerate(((33, 31), (96, 50), (1, 17), (130, 65))[first : first + 2], first):
            call = ffn_call(variant, sizes, **gate, **options[each])
            if each % 2:
                call = with_factors(call, scale=0.5)
            assert_same_bits(call, (torch.bfloat16, DTYPES[(each + number) % 4]), f"{gate}, {sizes}, {options[each]}")


def test_expert_ffn_of_several_blocks() -> None:
    for variant, sizes in zip(VARIANTS, cycle(((2880, 65), (65, 2880))), strict=False):
        call = ffn_call(variant, sizes, (3, 11, 14), fused_gate="interleaved", ranks=RANKS)
        assert_same_bits(call, BFLOAT16, f"{variant}, {sizes}")


def test_stacks_of_different_formats_and_dense_ones() -> None:
    calls = [
        ffn_call(variant, (96, 50))
        for variant in (VARIANTS[0], Variant("int8", torch.bfloat16), Variant("fp8_block", torch.float32))
    ]
    gate, up, down = (call.arguments[name] for call, name in zip(calls, ("gate", "up", "down"), strict=True))
    call = calls[0].replace(gate=gate, up=up, down=down)
    assert_same_bits(call, DTYPES)
    dense = call.replace(down=torch.randn(len(ROWS), 50, 96, dtype=torch.float64))
    assert_same_bits(dense, DTYPES)
    assert_same_bits(dense.replace(down=down, up=torch.randn(len(ROWS), 96, 50, dtype=torch.float64)), DTYPES)


@each_variant
def test_no_rows_or_no_columns(path: str, variant: Variant) -> None:
    is_transposed = VARIANTS.index(variant) % 2 == 0
    for sizes in ((0, 5), (5, 0), (0, 0)):
        stack = random_stack(variant, (3, *sizes), is_transposed=is_transposed)
        assert_same_bits(gmm_call((1, 0, 15), stack), DTYPES)
        assert_same_bits(gmm_call((), stack[:0]), DTYPES)
        assert stack.dequantize(torch.float32).shape == (3, *sizes)
    assert_same_bits(ffn_call(variant, (5, 0), (2, 4)), DTYPES)


@pytest.mark.parametrize("format", FORMATS)
def test_bits_do_not_depend_on_threads(format: str) -> None:
    variant = next(variant for variant in VARIANTS if variant.format == format)
    stack = random_stack(variant, (len(ROWS), 130, 200))
    calls = [gmm_call(ROWS, stack), gmm_call(ROWS, stack.mT), ffn_call(variant, (130, 65))]
    for call in calls:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(call.cast(torch.bfloat16)()[0])
        assert all(have_same_bits(result, results[0]) for result in results)
    torch.set_num_threads(2)
    dequantized = [stack.dequantize(torch.bfloat16)]
    torch.set_num_threads(1)
    assert have_same_bits(stack.dequantize(torch.bfloat16), dequantized[0])


@pytest.mark.slow
@pytest.mark.parametrize("isa", sorted({*maxmoe.build_info()["supported_isas"]} - {maxmoe.build_info()["isa"]}))
def test_every_instruction_set(isa: str) -> None:
    """The tests above run with the best instruction set only."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-k", "test_gmm or test_expert_ffn", __file__]
    done = programs.run(command, cwd=Path(__file__).parents[2], env=os.environ | {"MAXMOE_ISA": isa})
    assert done.returncode == 0, done.stdout


# Derivatives, compilation and what is saved


def quantized(call: Call) -> Call:
    """The call with quantized matrices. Values of MXFP4 are exact in all dtypes."""
    matrices = {name: call.arguments.get(name) for name in ("rhs", "gate", "up", "down")}
    return call.replace(**{name: quantize(value, "mxfp4") for name, value in matrices.items() if value is not None})


class TestGmm(AutogradTests):
    roundings = 3
    shared_in_backward = frozenset({"gmm"})  # the gradients of lhs and of a share a product

    def call(self, shape: Shape) -> Call:
        return quantized(factored_gmm_call(shape))


class TestExpertFfn(AutogradTests):
    roundings = 8
    shared_in_backward = frozenset({"expert_ffn_backward"})

    def call(self, shape: Shape) -> Call:
        return quantized(with_factors(matrix_calls.ffn_call(shape, bias=False)))
