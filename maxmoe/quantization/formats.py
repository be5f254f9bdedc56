"""Formats of quantized weights: codes, blocks and scales, and checks of tensors in a format."""

from dataclasses import dataclass

import torch
from torch import Tensor

from maxmoe.checks.fields import nearest

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of the weights
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Quantiles of the normal distribution between -1 and 1, with an exact zero.
# Source: https://github.com/bitsandbytes-foundation/bitsandbytes, functional.py
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_SMALLEST_GROUP = 32


def _positive_floats(exponent_bits: int, mantissa_bits: int, count: int) -> tuple[float, ...]:
    """Return the values of the first codes without sign of a small floating-point format with an IEEE bias."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(count):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits + (exponent > 0)
        values.append(fraction * 2.0 ** (max(exponent, 1) - bias))
    return tuple(values)


_E2M1 = _positive_floats(2, 1, 8)
_E4M3 = _positive_floats(4, 3, 127)  # code 127 is NaN


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of quantized weights.

    Args:
        name: name of the format.
        bits: bits per code, 4 or 8.
        values: values of the codes in ascending order; for a floating-point format the values without sign.
        signed_values: whether `values` are of all codes, so that no bit of the code is a sign.
        offset: what is added to an integer to get its code; 0 for two's complement.
        rows_per_scale: rows of a block.
        columns_per_scale: columns of a block; None for the whole row, and for a group size, which follows from the
            shape of the scales.
        has_groups: whether the number of columns of a block is a group size: a power of two from 32 on.
        scale_dtypes: dtypes of the scales; uint8 for scales of one byte.
        scale_bytes: what scales of one byte are, "E8M0", 2^(byte - 127), or "E4M3"; None for others.
        has_row_scales: whether each row has a float32 that its scales are multiplied by.
        low_nibble_first: whether the even columns are in the low halves of the bytes, for 4 bits.
    """

    name: str
    bits: int
    values: tuple[float, ...] | range
    signed_values: bool = False
    offset: int = 0
    rows_per_scale: int = 1
    columns_per_scale: int | None = None
    has_groups: bool = False
    scale_dtypes: tuple[torch.dtype, ...] = _FLOATS
    scale_bytes: str | None = None
    has_row_scales: bool = False
    low_nibble_first: bool = True

    @property
    def reach(self) -> float:
        """The quantized value that the largest magnitude of a block becomes; for integers half the range."""
        return (self.values[-1] - self.values[0]) / 2 if isinstance(self.values, range) else self.values[-1]

    def bytes_per_row(self, columns: int) -> int:
        """Return the number of bytes of a row of codes."""
        return -(-columns * self.bits // 8)

    def block_columns(self, columns: int, num_scales: int) -> int:
        """Return the number of columns of a block, given the columns of a row and the number of its scales.

        It is the smallest group size that gives this number of scales, so that it is 0 if there is none.
        """
        if not self.has_groups:
            return self.columns_per_scale or max(1, columns)
        group = _SMALLEST_GROUP
        while -(-columns // group) > max(1, num_scales):
            group *= 2
        return group if -(-columns // group) == num_scales else 0

    def shapes(self, rows: int, columns: int, block: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of the codes and of the scales of a matrix, given the columns of a block."""
        return (rows, self.bytes_per_row(columns)), (-(-rows // self.rows_per_scale), -(-columns // block))

    def check(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, row_scales: Tensor | None, columns: int
    ) -> None:
        """Raise unless codes, scales, zero points and scales of rows fit the format and each other."""
        if codes.dim() not in (2, 3):
            raise ValueError(f"codes must be uint8 (L, rows, bytes), got {codes.dtype} {tuple(codes.shape)}")
        *experts, rows, _ = codes.shape
        per_row = scales.shape[-1] if scales.dim() else 0
        block = self.block_columns(columns, per_row)
        if not block:
            wanted = f"one for each 32, 64, 128, ... of {columns} columns"
            raise ValueError(f"scales of {self.name} must be {wanted}, got {per_row} per row")
        if zeros is not None and self.name != "int4":
            raise ValueError(f"zeros must be None for {self.name}: int4 alone has zero points")
        if (row_scales is not None) != self.has_row_scales:
            raise ValueError(f"row_scales of {self.name} must be {'given' if self.has_row_scales else 'None'}")
        of_codes, of_scales = self.shapes(rows, columns, block)
        bytes_alone = (torch.uint8,)
        for name, part, dtypes, of_matrix in (
            ("codes", codes, bytes_alone, of_codes),
            ("scales", scales, self.scale_dtypes, of_scales),
            ("zeros", zeros, bytes_alone, of_scales),
            ("row_scales", row_scales, (torch.float32,), (rows, 1)),
        ):
            shape = (*experts, *of_matrix)
            if part is not None and (part.dtype not in dtypes or part.shape != shape):
                listed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise ValueError(
                    f"{name} of {self.name} must be {listed} {shape}, for {rows} rows of {columns} columns in blocks "
                    f"of {self.rows_per_scale} x {block}, got {part.dtype} {tuple(part.shape)}"
                )
        for part in (scales, zeros, row_scales):
            if part is not None and part.device != codes.device:
                raise ValueError(f"codes and scales must be on one device, got {codes.device} and {part.device}")
        if not codes.is_meta:
            self.check_values(scales, zeros, row_scales)

    def check_values(self, scales: Tensor, zeros: Tensor | None = None, row_scales: Tensor | None = None) -> None:
        """Raise unless all scales are finite, also multiplied by scales of rows, and all zero points are codes."""
        if self.scale_bytes is None:
            _refuse(~scales.isfinite(), scales, "scales must be finite")
        else:
            is_nan = scales == 255 if self.scale_bytes == "E8M0" else scales % 128 == 127
            _refuse(is_nan, scales, "scales must be finite", f", NaN in {self.scale_bytes},")
        if row_scales is not None:
            reach = torch.finfo(torch.float32).max / _E4M3[-1]
            wanted = f"row_scales must be between {-reach:.2g} and {reach:.2g}"
            _refuse(~(row_scales.abs() <= reach), row_scales, wanted)
        if zeros is not None and bool((zeros > 15).any()):
            raise ValueError(f"zeros must be below 16, got {int(zeros.max())}")


def _refuse(is_bad: Tensor, values: Tensor, wanted: str, meaning: str = "") -> None:
    """Raise if any value is bad, with the first one, its `meaning` and its index."""
    if bool(is_bad.any()):
        index = tuple(is_bad.nonzero()[0].tolist())
        raise ValueError(f"{wanted}, got {values[index].item()}{meaning} at {index}")


FORMATS = {
    each.name: each
    for each in (
        Format(
            name="mxfp4",
            bits=4,
            values=_E2M1,
            columns_per_scale=32,
            scale_dtypes=(torch.uint8,),
            scale_bytes="E8M0",
        ),
        Format(
            name="nvfp4",
            bits=4,
            values=_E2M1,
            columns_per_scale=16,
            scale_dtypes=(torch.uint8,),
            scale_bytes="E4M3",
            has_row_scales=True,
        ),
        Format(name="fp8_block", bits=8, values=_E4M3, rows_per_scale=128, columns_per_scale=128),
        Format(name="fp8_row", bits=8, values=_E4M3),
        Format(name="int4", bits=4, values=range(-8, 8), offset=8, has_groups=True),
        Format(name="int8", bits=8, values=range(-127, 128)),
        Format(name="nf4", bits=4, values=_NF4, signed_values=True, columns_per_scale=64, low_nibble_first=False),
    )
}


def format_named(name: str) -> Format:
    """Return the format with a name; raise for an unknown one."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}{nearest(str(name), FORMATS)}")
    return FORMATS[name]


def check_group_size(group_size: int) -> None:
    """Raise unless a group size is a power of two from 32 on."""
    is_int = isinstance(group_size, int) and not isinstance(group_size, bool)
    if not is_int or group_size < _SMALLEST_GROUP or group_size & (group_size - 1):
        raise ValueError(f"group_size must be a power of two >= {_SMALLEST_GROUP}, got {group_size!r}")


def check_dtype(dtype: torch.dtype) -> None:
    """Raise unless quantized weights can be dequantized to a dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float64, float32, bfloat16 or float16, got {dtype}")
