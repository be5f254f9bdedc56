"""Matrices of frozen experts in 4 or 8 bits: a view of codes, scales and zero points as one stack."""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from maxmoe.checks.fields import check_int
from maxmoe.quantization.formats import check_dtype, format_named

PARTS = ("codes", "scales", "zeros", "row_scales")  # of a stack: its tensors, in the order of the operators


class QuantizedStack:
    """Matrices of L frozen experts, quantized: codes of 4 or 8 bits and a scale for each block of them.

    It has the shape and the dtype of the tensor that it stands for, but only views the codes, scales and zero points.
    `expert_ffn` and `gmm` of `maxmoe.ops` read them; nothing is dequantized without `dequantize`. A module holds them
    as parameters in a `QuantizedWeight`, which is such a stack as well. Parts and transposed stacks share the memory.

    Args:
        codes: ``(L, rows, bytes)``, uint8, codes of each row; for 4 bits, two in each byte. A row holds the inputs of
            one output, as in `torch.nn.Linear`. Without the first dim for one matrix.
        scales: scale of each block, ``(L, rows / rows of a block, columns / columns of a block)``, rounded up.
        format: name of a format in `maxmoe.quantization.FORMATS`.
        zeros: zero points, uint8, with the shape of the scales, for "int4"; None for 8.
        row_scales: ``(L, rows, 1)``, float32, what the scales of each row are multiplied by, for "nvfp4".
        columns: number of columns of the matrices; None for one column per code in a row.
        is_transposed: whether the shape is ``(L, columns, rows)`` instead of ``(L, rows, columns)``.
        dtype: dtype that the stack is dequantized to by default.

    Raises:
        ValueError: for tensors that do not fit the format or each other, and for scales that are not finite.
    """

    requires_grad = False  # read by PEFT

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        *,
        format: str,
        zeros: Tensor | None = None,
        row_scales: Tensor | None = None,
        columns: int | None = None,
        is_transposed: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        known = format_named(format)
        if columns is None:
            columns = codes.shape[-1] * 8 // known.bits if codes.dim() else 0
        check_int("columns", columns, at_least=0)
        check_dtype(dtype)
        known.check(codes, scales, zeros, row_scales, columns)
        self.codes, self.scales, self.zeros, self.row_scales = codes, scales, zeros, row_scales
        self.format, self.columns, self.is_transposed, self.dtype = format, columns, is_transposed, dtype

    @property
    def rows(self) -> int:
        """Number of rows of the matrices, the output features."""
        return self.codes.shape[-2]

    @property
    def shape(self) -> torch.Size:
        """``(L, rows, columns)``, or ``(L, columns, rows)`` if the stack is transposed."""
        sizes = (self.columns, self.rows) if self.is_transposed else (self.rows, self.columns)
        return torch.Size([*self.codes.shape[:-2], *sizes])

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    @property
    def is_meta(self) -> bool:
        """Whether the codes are on the meta device."""
        return self.codes.is_meta

    @property
    def mT(self) -> "QuantizedStack":  # noqa: N802  # as of a tensor
        """The stack of the transposed matrices."""
        return self.map(is_transposed=not self.is_transposed)

    @property
    def rows_per_scale(self) -> int:
        """Number of rows of a block."""
        return format_named(self.format).rows_per_scale

    @property
    def columns_per_scale(self) -> int:
        """Number of columns of a block."""
        return format_named(self.format).block_columns(self.columns, self.scales.shape[-1])

    @property
    def nbytes(self) -> int:
        """Number of bytes of codes, scales and zero points."""
        return sum(part.nbytes for part in self.parts().values())

    def dim(self) -> int:
        """Return 3 for a stack, 2 for one matrix."""
        return self.codes.dim()

    def numel(self) -> int:
        """Return the number of weights."""
        return math.prod(self.shape)

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that the stack views, by the names of its attributes."""
        parts = {name: getattr(self, name) for name in PARTS}
        return {name: part for name, part in parts.items() if part is not None}

    def map(self, function: Callable[[Tensor], Tensor] = lambda part: part, **changes: Any) -> "QuantizedStack":
        """Return a stack with the results of a function of its parts, and other attributes as given."""
        names = (*PARTS, "format", "columns", "is_transposed", "dtype")
        attributes = {name: getattr(self, name) for name in names}
        parts = {name: function(part) for name, part in self.parts().items() if name not in changes}
        stack = object.__new__(QuantizedStack)
        vars(stack).update(attributes | parts | changes)
        return stack

    def __getitem__(self, index: Any) -> "QuantizedStack":
        """Return the matrix of an expert or the stack of several; with ``stack[..., outputs]``, a slice of the outputs.

        A slice of outputs needs a transposed stack, ``(L, in, out)``, and consists of whole blocks.
        """
        if not isinstance(index, tuple):
            return self.map(lambda part: part[index])
        if len(index) != 2 or index[0] is not ... or not isinstance(index[1], slice) or not self.is_transposed:
            self._refuse(f"an index {index}")
        start, stop, step = index[1].indices(self.rows)
        block, stop = self.rows_per_scale, max(start, stop)
        if step != 1 and block > 1:
            self._refuse(f"a slice of rows with step {step}, where a scale is of {block} rows,")
        for border in (start, stop):
            if border % block and border != self.rows:
                raise ValueError(
                    f"a slice of rows of weights quantized as {self.format} must begin and end at multiples of "
                    f"{block}, the rows of a scale, got {border} of {self.rows}"
                )
        codes = self.codes[..., start:stop:step, :]
        of_scales = slice(start // block, -(-stop // block), step)
        return self.map(lambda part: part[..., of_scales, :], codes=codes)

    def new_empty(self, shape: torch.Size) -> "QuantizedStack":
        """Return a stack of another shape, in the same layout and with the same blocks."""
        format = format_named(self.format)
        *experts, rows, columns = (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape
        block = self.columns_per_scale if format.has_groups else format.block_columns(columns, 0)
        of_codes, of_scales = format.shapes(rows, columns, block)
        codes = self.codes.new_empty((*experts, *of_codes))
        changes = {"codes": codes, "columns": columns}
        if self.row_scales is not None:
            changes["row_scales"] = self.row_scales.new_empty((*experts, rows, 1))
        return self.map(lambda part: part.new_empty((*experts, *of_scales)), **changes)

    def copy_(self, other: "QuantizedStack") -> None:
        """Copy the parts of another stack of the same format, layout and shape."""
        if not isinstance(other, QuantizedStack):
            self._refuse("a copy from a tensor that is not quantized")
        if self.description() != other.description():
            raise ValueError(f"a quantized stack must be copied from {self.description()}, got {other.description()}")
        for name, part in self.parts().items():
            part.copy_(other.parts()[name])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weights as an ordinary tensor.

        Each is the float32 product of code and scale, rounded once; in "nvfp4" the scale is the float32 product of the
        scales of block and row.

        Args:
            dtype: dtype of the result; None for the dtype of the stack.

        Returns:
            Tensor with the shape of the stack.
        """
        from maxmoe import _C  # formats and checkpoints need no operators

        dtype = self.dtype if dtype is None else dtype
        check_dtype(dtype)
        if not self.numel():
            return torch.empty(self.shape, dtype=dtype, device=self.device)
        parts = {name: part if part.dim() == 3 else part.unsqueeze(0) for name, part in self.parts().items()}
        dequantize = torch.ops.maxmoe.dequantize if torch.compiler.is_compiling() else _C.dequantize
        beside = (parts["scales"], parts.get("zeros"), parts.get("row_scales"))
        matrices: Tensor = dequantize(parts["codes"], *beside, self.format, self.columns, dtype)
        matrices = matrices.view(*self.codes.shape[:-1], self.columns)
        return matrices.mT if self.is_transposed else matrices

    def description(self) -> str:
        """Return everything but the values, for comparisons and `print`."""
        return (
            f"{tuple(self.shape)}, format={self.format!r}, block={self.rows_per_scale} x {self.columns_per_scale}, "
            f"scales={self.scales.dtype}, zeros={self.zeros is not None}, is_transposed={self.is_transposed}, "
            f"dtype={self.dtype}"
        )

    def __repr__(self) -> str:
        return f"QuantizedStack({self.description()})"

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"{what} is not possible with weights quantized as {self.format}, of shape {tuple(self.shape)}: "
            "stack.dequantize() returns a tensor"
        )
