"""Quantization: nearest codes by the definition, scales, memory, errors."""

import itertools
import sys

import pytest
import torch
from torch import Tensor

from maxmoe.quantization import FORMATS, QuantizedStack, quantize
from support import memory

each_format = pytest.mark.parametrize("format", FORMATS)


def scale_of_each_weight(stack: QuantizedStack) -> Tensor:
    """Scales as (L, rows, columns), float64."""
    scales = stack.scales.double()
    if stack.format == "mxfp4":
        scales = 2.0 ** (scales - 127)
    if stack.row_scales is not None:
        scales = (stack.scales.view(torch.float8_e4m3fn).float() * stack.row_scales).double()
    spread = scales.repeat_interleave(stack.rows_per_scale, 1)[:, : stack.rows]
    return spread.repeat_interleave(stack.columns_per_scale, 2)[..., : stack.columns]


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        *((format, torch.float32) for format in FORMATS),
        ("mxfp4", torch.float64),
        ("int4", torch.bfloat16),
        ("fp8_row", torch.float16),
    ],
)
def test_each_weight_gets_the_nearest_value(format: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = (torch.randn(2, 140, 133) * torch.rand(2, 140, 133).exp()).to(dtype)
    stack = quantize(weights, format)
    assert stack.shape == weights.shape and stack.is_transposed and stack.dtype == dtype
    scales = scale_of_each_weight(stack)
    values = torch.tensor(FORMATS[format].values, dtype=torch.float64)
    values = values if values[0] < 0 else torch.cat([values, -values])  # values of codes without sign
    scaled = weights.mT.double() / scales
    best = (scaled[..., None] - values).abs().amin(-1)
    got = (scaled - stack.mT.dequantize(torch.float64) / scales).abs()
    torch.testing.assert_close(got, best, rtol=0, atol=5e-5)  # products of 448 are rounded


def test_ties_go_to_the_even_code() -> None:
    """The midpoints between the values of E2M1, with a scale of one; larger values saturate."""
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0]
    weights = torch.tensor([*values, *(-value for value in values), 0.25000003, 0.24999999, 4.9999995, -0.0]).view(
        1, -1, 1
    )
    got = quantize(weights, "mxfp4").dequantize().flatten().tolist()
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert got == [*expected, *(-value for value in expected), 0.5, 0.0, 4.0, -0.0]


def test_e4m3_rounds_as_torch() -> None:
    """All float32 in bfloat16 up to the largest E4M3, with a scale of one; torch rounds ties to even as well."""
    positive = torch.arange(0x43E1, dtype=torch.int16).view(torch.bfloat16)
    assert positive[-1] == 448
    weights = torch.cat([positive, -positive]).float().view(1, -1, 1)
    stack = quantize(weights, "fp8_row")
    assert stack.scales.item() == 1
    assert torch.equal(stack.codes.flatten(), weights.flatten().to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(
    ("largest", "byte"), [(1.0, 125), (6.0, 127), (7.99, 127), (8.0, 128), (0.0, 0), (1e-40, 0), (3e38, 252)]
)
def test_scales_of_mxfp4(largest: float, byte: int) -> None:
    """2^(floor(log2(max)) - 2): OCP Microscaling Formats 1.0, section 6.3."""
    weights = torch.zeros(1, 32, 1)
    weights[0, 5] = -largest
    assert quantize(weights, "mxfp4").scales.item() == byte


@each_format
def test_no_magnitude_gives_an_infinite_weight(format: str) -> None:
    dtypes, scales = (torch.float32, torch.float16, torch.bfloat16), (0.0, 1e-45, 1e-39, 1e-8, 1.0, 6e4, 3e38)
    for dtype, scale in itertools.product(dtypes, scales):
        weights = (torch.randn(1, 64, 3, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * scale).to(dtype)
        weights = weights.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        got = quantize(weights, format).dequantize(torch.float32)
        assert got.isfinite().all(), scale
        if scale == 0:
            assert not got.any()
        if scale in (1.0, 3e38) and dtype != torch.float16:
            torch.testing.assert_close(got, weights.float(), rtol=0.3, atol=0.15 * scale)


@pytest.mark.parametrize("format", [format for format in FORMATS if format != "int4"])
def test_quantizing_twice_keeps_codes_and_scales(format: str) -> None:
    """In "nvfp4", the scale of rows may change its last bit. In "int4", 7.5 scales become 7 or -8."""
    first = quantize(torch.randn(2, 140, 133, generator=torch.Generator().manual_seed(0)), format)
    again = quantize(first.dequantize(), format)
    torch.testing.assert_close(again.dequantize(), first.dequantize(), rtol=2**-22 if format == "nvfp4" else 0, atol=0)


def test_scales_of_nvfp4() -> None:
    """The largest magnitude of a matrix becomes 6 * 448, that of a block 6 times its scale, at least 2^-9."""
    weights = torch.zeros(2, 64, 3)
    weights[0, 5, 1], weights[0, 17, 1], weights[0, 33, 2] = -2688.0, 42.0, 1e-3
    stack = quantize(weights, "nvfp4")
    assert stack.row_scales[0].flatten().tolist() == [1.0] * 3 and stack.row_scales[1].unique().numel() == 1
    scales = stack.scales.view(torch.float8_e4m3fn).float()
    assert scales[0, 1, :2].tolist() == [448.0, 7.0] and scales[0, 2, 2] == 2**-9 == scales[1].unique()
    got = stack.dequantize()
    assert got[0, 5, 1] == -2688 and got[0, 17, 1] == 42 and got[0, 33, 2] == 2**-10 and not got[1].any()


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, None])
def test_group_sizes(group_size: int | None) -> None:
    """A block at the end of a row may be shorter; the type finds the group size in the shape of the scales."""
    weights = torch.randn(2, 300, 5, generator=torch.Generator().manual_seed(0))
    stack = quantize(weights, "int4", group_size)
    group = group_size or 128
    assert stack.columns_per_scale == group and stack.scales.shape == (2, 5, -(-300 // group))
    blocks = torch.nn.functional.pad(weights, (0, 0, 0, -300 % group)).unflatten(1, (-1, group))
    torch.testing.assert_close(stack.scales.mT, blocks.abs().amax(2) / 7.5)


def test_bytes_of_each_format() -> None:
    """Memory for 2 x 1024 x 512 weights."""
    weights = torch.zeros(2, 1024, 512, dtype=torch.bfloat16)
    expected = {
        "mxfp4": 4.25,
        "nvfp4": 4.5 + 32 / 1024,
        "fp8_block": 8 + 32 / 128**2,
        "fp8_row": 8 + 32 / 1024,
        "int4": 4 + 16 / 128,
        "int8": 8 + 32 / 1024,
        "nf4": 4.5,
    }
    assert {format: quantize(weights, format).nbytes * 8 / weights.numel() for format in expected} == expected


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
@pytest.mark.parametrize("format", ["mxfp4", "int8"])
def test_memory_beside_the_result_is_less_than_one_expert(format: str) -> None:
    bits = FORMATS[format].bits
    weights = torch.randn(4096).repeat(8 // bits, 4096, 1)
    quantize(weights[:1, :256], format)
    with memory.at_most(weights[0].nbytes + weights.numel() * bits // 8 * 9 // 8):
        quantize(weights, format)


def test_meta_and_strides() -> None:
    weights = torch.randn(3, 7, 5).transpose(0, 2)
    assert torch.equal(quantize(weights, "nf4").dequantize(), quantize(weights.contiguous(), "nf4").dequantize())
    stack = quantize(weights.to("meta"), "int4", 32)
    assert stack.is_meta and stack.shape == (5, 7, 3) and stack.codes.is_meta


def test_weights_that_cannot_be_quantized() -> None:
    weights = torch.randn(2, 64, 8)
    with pytest.raises(ValueError, match=r"format must be one of .*, got 'mxpf4'; the nearest are 'mxfp4'"):
        quantize(weights, "mxpf4")
    with pytest.raises(ValueError, match=r"format must be one of .*, got \['mxfp4'\]"):
        quantize(weights, ["mxfp4"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weights must be floating \(L, in, out\), got torch.float32 \(64, 8\)"):
        quantize(weights[0], "nf4")
    with pytest.raises(ValueError, match=r"weights must be floating .*, got torch.int64"):
        quantize(weights.long(), "nf4")
    with pytest.raises(TypeError, match=r"weights must be a tensor .*, got QuantizedStack"):
        quantize(quantize(weights, "nf4"), "nf4")
    with pytest.raises(ValueError, match=r"group_size must be None for mxfp4: int4 alone has one, got 32"):
        quantize(weights, "mxfp4", 32)
    for group_size in (16, 48, 0, -32, True, 32.0):
        with pytest.raises(ValueError, match=r"group_size must be a power of two >= 32, got"):
            quantize(weights, "int4", group_size)  # type: ignore[arg-type]
    for value in (torch.nan, torch.inf, -torch.inf):
        weights[1, 3, 4] = value
        for format in FORMATS:
            with pytest.raises(ValueError, match=r"weights must be finite in float32, got (inf|nan)"):
                quantize(weights, format)
    with pytest.raises(ValueError, match=r"weights must be finite in float32, got 1e\+300"):
        quantize(torch.full((1, 2, 3), -1e300, dtype=torch.float64), "int8")
    with pytest.raises(TypeError, match=r"weights must be a tensor \(L, in, out\), got list"):
        quantize([[1.0]], "mxfp4")  # type: ignore[arg-type]
