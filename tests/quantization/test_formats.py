"""Values of all codes and scales, against published definitions."""

from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe.quantization import QuantizedStack
from support.quantized_calls import have_same_bits


def dequantized(format: str, codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of codes, one row with one scale."""
    return QuantizedStack(codes[None, None], scale.view(1, 1, 1), format=format).dequantize(dtype)[0, 0]


ALL_CODES = torch.arange(256, dtype=torch.uint8)
ONE = torch.ones(1)
# Two codes in each byte: all 16, in the order of the columns.
PAIRS = torch.arange(0, 16, 2, dtype=torch.uint8) | torch.arange(1, 16, 2, dtype=torch.uint8) << 4


def test_int4_is_low_half_first_and_its_zero_is_eight() -> None:
    assert dequantized("int4", PAIRS, ONE).tolist() == [float(code - 8) for code in range(16)]


def test_nf4_is_high_half_first_and_of_quantiles() -> None:
    """Appendix E of the QLoRA paper, as `create_normal_map` of bitsandbytes computes it."""

    def quantiles(count: int) -> list[float]:
        offset = 0.9677083
        levels = [offset + (0.5 - offset) * index / (count - 1) for index in range(count - 1)]
        return [NormalDist().inv_cdf(level) for level in levels]

    values = sorted([*quantiles(9), 0.0, *(-value for value in quantiles(8))])
    swapped = PAIRS >> 4 | PAIRS << 4
    got = dequantized("nf4", swapped, ONE)
    torch.testing.assert_close(got, torch.tensor(values) / max(values), rtol=1e-6, atol=1e-6)
    assert got.tolist() == sorted(got.tolist()) and 0.0 in got.tolist()


mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


def test_nvfp4_by_hand() -> None:
    """Two rows of 17 columns: scales 1.125 and 448, and 2^-9 and -1.5; the scales of rows are 0.1 and 3."""
    scales = torch.tensor([[[1.125, 448.0], [2.0**-9, -1.5]]]).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.cat([PAIRS, torch.tensor([5], dtype=torch.uint8)]).expand(1, 2, 9)
    row_scales = torch.tensor([[[0.1], [3.0]]])
    stack = QuantizedStack(codes, scales, row_scales=row_scales, format="nvfp4", columns=17)
    values = torch.tensor([*mxfp4.FP4_VALUES, 3.0])
    factors = torch.tensor([[1.125] * 16 + [448.0], [2.0**-9] * 16 + [-1.5]]) * row_scales[0]
    assert torch.equal(stack.dequantize(torch.float32)[0], values * factors)
    assert torch.equal(stack.dequantize(torch.bfloat16)[0], (values * factors).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_with_all_scales_is_that_of_transformers(dtype: torch.dtype) -> None:
    """All codes with all 255 scales: the smallest are subnormal, and 6 * 2^127 is not finite."""
    blocks = PAIRS.repeat(2).expand(1, 255, 1, 16).contiguous()  # [experts, out, in / 32, 16]
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # [experts, in, out]
    stack = QuantizedStack(blocks.flatten(2), scales, format="mxfp4", is_transposed=True, dtype=dtype)
    got = stack.dequantize()
    assert got.shape == (1, 32, 255) and got.dtype == dtype
    assert torch.equal(got.contiguous().view(torch.uint8), expected.view(torch.uint8))
    assert got[0, 1, 0] == 2.0**-128 and got[0, 7, 254].isinf()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_is_that_of_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    theirs: Any = Fp8Dequantize(None)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (256, 384), generator=generator, dtype=torch.uint8)
    codes[codes % 128 == 127] = 0
    for scale_dtype in (torch.float32, torch.bfloat16):
        scales = torch.randn(2, 3, generator=generator).exp().to(scale_dtype)
        stack = QuantizedStack(codes, scales, format="fp8_block", dtype=dtype)
        expected = theirs._dequantize_one(codes.view(torch.float8_e4m3fn), scales, output_dtype=dtype)
        assert torch.equal(stack.dequantize(), expected)
        rows = torch.randn(256, 1, generator=generator).exp().to(scale_dtype)
        expected = theirs._dequantize_one(codes.view(torch.float8_e4m3fn), rows, output_dtype=dtype)
        assert torch.equal(QuantizedStack(codes, rows, format="fp8_row", dtype=dtype).dequantize(), expected)


@pytest.mark.parametrize("scale", [1.0, 0.1, 2.0**-149, 2.0**-126, 1.1754942e-38, 3.0e38, 0.0, -1.0])
@pytest.mark.parametrize("format", ["fp8_row", "fp8_block", "int8"])
def test_codes_of_torch(format: str, scale: float) -> None:
    """One float32 product: subnormal results are exact, too large ones infinite."""
    values = ALL_CODES.view(torch.int8 if format == "int8" else torch.float8_e4m3fn).double()
    expected = (values * torch.tensor(scale).double()).float()
    for codes, part in zip(ALL_CODES.view(2, 128), expected.view(2, 128), strict=True):  # of one block
        assert have_same_bits(dequantized(format, codes, torch.tensor(scale)), part)
        assert have_same_bits(dequantized(format, codes, torch.tensor(scale), torch.float64), part.double())


def test_zero_points_of_each_group() -> None:
    """Codes minus zero point, a group of 32 after the other, as compressed-tensors has asymmetric weights."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (2, 3, 80), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (2, 3, 3), generator=generator, dtype=torch.uint8)
    scales = torch.rand(2, 3, 3, generator=generator)
    stack = QuantizedStack(codes[..., 0::2] | codes[..., 1::2] << 4, scales, zeros=zeros, format="int4")
    assert stack.columns_per_scale == 32
    for column in range(80):
        group = column // 32
        expected = (codes[..., column].float() - zeros[..., group].float()) * scales[..., group]
        assert torch.equal(stack.dequantize(torch.float32)[..., column], expected)
