"""The stack: views, copies, and errors that name the argument and both values."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from maxmoe.quantization import FORMATS, QuantizedStack, quantize
from support.named import named
from support.quantized_calls import stack_of

each_format = pytest.mark.parametrize("format", FORMATS)


def assert_same(got: Any, expected: QuantizedStack) -> None:
    """The same bits in the same layout."""
    assert type(got) is QuantizedStack and got.shape == expected.shape
    assert (got.format, got.is_transposed, got.dtype) == (expected.format, expected.is_transposed, expected.dtype)
    for name, part in expected.parts().items():
        assert got.parts()[name].dtype == part.dtype and torch.equal(got.parts()[name], part), name


VIEWS: list[Callable[[Any], Any]] = [
    lambda stack: stack[1],
    lambda stack: stack[-1].mT,
    lambda stack: stack[0:2],
    lambda stack: stack[::2],
    lambda stack: stack[2:1],
    lambda stack: stack[torch.tensor([2, 0, 2])],
    lambda stack: stack[torch.tensor([True, False, True])],
    lambda stack: stack.mT,
    lambda stack: stack[..., 128:],
    lambda stack: stack[..., 128:256],
    lambda stack: stack[1][..., :128].mT,
]


@each_format
def test_views_and_indices(format: str) -> None:
    stack = stack_of(format)
    for number, view in enumerate(VIEWS):
        with named(f"view {number}"):
            got = view(stack)
            assert isinstance(got, QuantizedStack)
            assert torch.equal(got.dequantize(), view(stack.dequantize()))
            assert got.columns_per_scale == stack.columns_per_scale
            is_copy = got.codes.untyped_storage().data_ptr() != stack.codes.untyped_storage().data_ptr()
            assert is_copy == (got.numel() > 0 and "tensor" in str(view.__code__.co_names))


@each_format
def test_rows_alternate(format: str) -> None:
    """Gate and up of gpt-oss, with blocks of one row."""
    stack = stack_of(format)
    if format == "fp8_block":
        with pytest.raises(ValueError, match="slice of rows with step 2, where a scale is of 128 rows"):
            stack[..., 0::2]
        return
    assert torch.equal(stack[..., 1::2].dequantize(), stack.dequantize()[..., 1::2])


def test_indices_that_would_cut_blocks() -> None:
    with pytest.raises(ValueError, match=r"rows of weights quantized as fp8_block .* of 128, .* got 100 of 384"):
        stack_of("fp8_block")[..., 100:]
    for index in ((slice(None), 3), (..., 3), (0, ...), (slice(None), slice(None), slice(3))):
        with pytest.raises(ValueError, match=r"an index .* is not possible with weights quantized as mxfp4"):
            stack_of("mxfp4")[index]
    with pytest.raises(ValueError, match=r"an index .* is not possible with weights quantized as mxfp4"):
        stack_of("mxfp4").mT[..., :32]


@each_format
def test_the_last_block_may_be_shorter(format: str) -> None:
    stack = stack_of(format, 2, 170, 150)
    assert torch.equal(stack[..., 128:].dequantize(), stack.dequantize()[..., 128:])


@each_format
def test_copies(format: str) -> None:
    stack = stack_of(format)
    for copied in (stack.map(torch.clone), copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        assert_same(copied, stack)
        assert copied.codes.data_ptr() != stack.codes.data_ptr()
    empty = stack.map(torch.zeros_like)
    empty[1].copy_(stack[1])
    assert torch.equal(empty.codes[1], stack.codes[1]) and not empty.codes[0].any()
    larger = stack.new_empty(torch.Size([4, 256, 128]))
    assert larger.shape == (4, 256, 128) and larger.columns_per_scale == stack.columns_per_scale
    larger[:3].copy_(stack[..., :128])
    assert torch.equal(larger[:3].dequantize(), stack.dequantize()[..., :128])
    meta = stack.map(lambda part: part.to("meta"))
    assert meta.is_meta and meta.nbytes == stack.nbytes and meta.shape == stack.shape
    assert meta.numel() == 3 * 256 * 384 and meta.dim() == 3


def test_what_cannot_be_copied() -> None:
    stack = stack_of("int4")
    for other, message in (
        (stack_of("nf4"), r"copied from .*, format='int4', .*, got .*, format='nf4', "),
        (stack[1:], r"copied from \(3, 256, 384\), .*, got \(2, 256, 384\), "),
        (quantize(stack.dequantize(), "int4", 32), "block=1 x 128, .*, got .*, block=1 x 32, "),
        (stack_of("int4", 3, 384, 256).mT, r"is_transposed=True, .*, got \(3, 256, 384\), .*, is_transposed=False, "),
        (stack_of("int4", dtype=torch.float32), "scales=torch.bfloat16, .*, got .* scales=torch.float32, "),
        (
            QuantizedStack(
                stack.codes,
                stack.scales,
                zeros=stack.scales.new_full(stack.scales.shape, 8, dtype=torch.uint8),
                format="int4",
                is_transposed=True,
            ),
            "zeros=False, .*, got .*, zeros=True, ",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            stack.copy_(other)
    with pytest.raises(ValueError, match="a copy from a tensor that is not quantized is not possible"):
        stack.copy_(stack.dequantize())


@pytest.mark.parametrize(
    "operation",
    [
        lambda stack: stack + 1,
        lambda stack: torch.ones(3, 2, 256) @ stack,
        lambda stack: nn.functional.linear(torch.ones(2, 384), stack[0]),
        lambda stack: torch.cat([stack, stack]),
        lambda stack: torch.zeros_like(stack),
        lambda stack: nn.init.normal_(stack),
        lambda stack: nn.Parameter(stack),
    ],
)
def test_a_stack_is_no_tensor(operation: Callable[[Any], Any]) -> None:
    """Other operators do not dequantize it implicitly."""
    with pytest.raises((TypeError, AttributeError)):
        operation(stack_of("mxfp4"))


def test_a_dtype_that_it_has_not() -> None:
    with pytest.raises(ValueError, match=r"dtype must be float64, float32, bfloat16 or float16, got torch.int8"):
        stack_of("mxfp4").dequantize(torch.int8)


# Tensors that do not fit a format or each other

CODES, SCALES = torch.zeros(2, 6, 64, dtype=torch.uint8), torch.ones(2, 6, 4)
NVFP4: dict[str, Any] = {"format": "nvfp4", "scales": torch.zeros(2, 6, 8, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"format": "fp4"},
            "format must be one of mxfp4, .*, got 'fp4'; the nearest are 'nf4', 'mxfp4'|'mxfp4', 'nf4'",
        ),
        ({"codes": CODES[0, 0]}, r"codes must be uint8 \(L, rows, bytes\), got torch.uint8 \(64,\)"),
        ({"columns": -1}, "columns must be an int >= 0, got -1"),
        (
            {"columns": 126},
            r"codes of int4 must be uint8 \(2, 6, 63\), .* of 126 columns .*, got torch.uint8 \(2, 6, 64\)",
        ),
        (
            {"scales": SCALES.double()},
            r"scales of int4 must be float32 or bfloat16 or float16 \(2, .*, got torch.float64",
        ),
        (
            {"scales": SCALES[..., :3]},
            "scales of int4 must be one for each 32, 64, 128, .* of 128 columns, got 3 per row",
        ),
        ({"scales": torch.tensor(1.0)}, "scales of int4 must .* got"),
        ({"scales": SCALES.to("meta")}, "codes and scales must be on one device, got cpu and meta"),
        (
            {"scales": SCALES.index_fill(1, torch.tensor([4]), torch.inf)},
            r"scales must be finite, got inf at \(0, 4, 0\)",
        ),
        ({"format": "mxfp4"}, r"scales of mxfp4 must be uint8 \(2, 6, 4\), .*, got torch.float32"),
        (
            {"format": "mxfp4", "scales": torch.full((2, 6, 4), 255).byte()},
            r"finite, got 255, NaN in E8M0, at \(0, 0, 0\)",
        ),
        ({"format": "fp8_block"}, r"\(2, 1, 1\), .* in blocks of 128 x 128, got torch.float32 \(2, 6, 4\)"),
        (
            {"format": "nf4", "zeros": SCALES.byte(), "scales": SCALES[..., :2]},
            r"zeros must be None for nf4: int4 alone",
        ),
        (
            {"zeros": SCALES.byte()[..., :2]},
            r"zeros of int4 must be uint8 \(2, 6, 4\), .*, got torch.uint8 \(2, 6, 2\)",
        ),
        ({"zeros": torch.full((2, 6, 4), 16).byte()}, "zeros must be below 16, got 16"),
        ({"row_scales": SCALES[..., :1]}, "row_scales of int4 must be None"),
        (NVFP4, "row_scales of nvfp4 must be given"),
        (
            NVFP4 | {"row_scales": SCALES},
            r"row_scales of nvfp4 must be float32 \(2, 6, 1\), .* 1 x 16, got torch.float32 \(2, 6, 4\)",
        ),
        (NVFP4 | {"row_scales": SCALES[..., :1] * -1e36}, r"row_scales must be between -7.6e\+35 .* got -1e\+36|-9.9"),
        (
            NVFP4 | {"row_scales": SCALES[..., :1], "scales": NVFP4["scales"] | 255},
            r"scales must be finite, got 255, NaN in E4M3, at \(0, 0, 0\)",
        ),
        ({"dtype": torch.int32}, "dtype must be float64, float32, bfloat16 or float16, got torch.int32"),
    ],
)
def test_tensors_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    tensors: Any = {"codes": CODES, "scales": SCALES, "format": "int4"} | arguments
    with pytest.raises(ValueError, match=message):
        QuantizedStack(tensors.pop("codes"), tensors.pop("scales"), **tensors)
