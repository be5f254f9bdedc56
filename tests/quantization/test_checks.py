"""Tensors that do not fit a format or each other: errors that name the argument and both values."""

from typing import Any

import pytest
import torch

from maxmoe.quantization import QuantizedStack

CODES, SCALES = torch.zeros(2, 6, 64, dtype=torch.uint8), torch.ones(2, 6, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"format": "fp4"},
            "format must be one of mxfp4, .*, got 'fp4'; the nearest are 'nf4', 'mxfp4'|'mxfp4', 'nf4'",
        ),
        ({"codes": CODES.int()}, r"codes of int4 must be uint8 \(2, 6, 64\), .*, got torch.int32 \(2, 6, 64\)"),
        ({"codes": CODES[0, 0]}, r"codes must be uint8 \(L, rows, bytes\), got torch.uint8 \(64,\)"),
        ({"columns": -1}, "columns must be an int >= 0, got -1"),
        ({"columns": 128.0}, "columns must be an int >= 0, got 128.0"),
        (
            {"columns": 126},
            r"codes of int4 must be uint8 \(2, 6, 63\), .* of 126 columns .*, got torch.uint8 \(2, 6, 64\)",
        ),
        (
            {"scales": SCALES.double()},
            r"scales of int4 must be float32 or bfloat16 or float16 \(2, .*, got torch.float64",
        ),
        (
            {"scales": SCALES[:, :3]},
            r"scales of int4 must be .* \(2, 6, 4\), for 6 rows of 128 columns .*, got torch.float32 \(2, 3, 4\)",
        ),
        (
            {"scales": SCALES[..., :3]},
            "scales of int4 must be one for each 32, 64, 128, .* of 128 columns, got 3 per row",
        ),
        (
            {"scales": SCALES[..., :0]},
            "scales of int4 must be one for each 32, 64, 128, .* of 128 columns, got 0 per row",
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
        ({"format": "int8"}, r"\(2, 6, 1\), .* in blocks of 1 x 64, got torch.float32 \(2, 6, 4\)"),
        (
            {"format": "nf4", "zeros": SCALES.byte(), "scales": SCALES[..., :2]},
            r"zeros must be None for nf4: int4 alone",
        ),
        ({"zeros": SCALES}, r"zeros of int4 must be uint8 \(2, 6, 4\), .*, got torch.float32 \(2, 6, 4\)"),
        (
            {"zeros": SCALES.byte()[..., :2]},
            r"zeros of int4 must be uint8 \(2, 6, 4\), .*, got torch.uint8 \(2, 6, 2\)",
        ),
        ({"zeros": torch.full((2, 6, 4), 16).byte()}, "zeros must be below 16, got 16"),
        ({"dtype": torch.int32}, "dtype must be float64, float32, bfloat16 or float16, got torch.int32"),
    ],
)
def test_tensors_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    tensors: Any = {"codes": CODES, "scales": SCALES, "format": "int4"} | arguments
    with pytest.raises(ValueError, match=message):
        QuantizedStack(tensors.pop("codes"), tensors.pop("scales"), **tensors)
