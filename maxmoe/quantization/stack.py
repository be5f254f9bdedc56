"""Tensor that holds the matrices of frozen experts in 4 or 8 bits."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe import _library as _library  # registers the operator dequantize
from maxmoe._torch import make_wrapper_subclass, no_torch_function, tree_leaves
from maxmoe.field_checks import check_int
from maxmoe.quantization.checks import check_dtype, check_parts
from maxmoe.quantization.formats import format_named

# Functions that compute an operator of torch on stacks, by the operator: see stack_operators.
OPERATORS: dict[Any, Callable[..., Any]] = {}


class QuantizedStack(Tensor):
    """Matrices of L frozen experts, quantized: codes of 4 or 8 bits and a scale for each block of them.

    It stands for a tensor with its shape and dtype, for example in ``nn.Parameter(stack, requires_grad=False)``, but
    holds the codes, the scales and the zero points alone. `expert_ffn` and `gmm` of `maxmoe.ops` read them. `to`,
    `clone`, `copy_`, indexing of experts, slices at the borders of blocks, transposition, saving and loading work;
    every other operation raises an error, because nothing is dequantized without `dequantize`. Conversion to another
    dtype changes `dtype` alone and shares the memory. Slices and transposed stacks share it as well.

    Args:
        codes: ``(L, rows, bytes)``, uint8, codes of each row; for 4 bits, two in each byte. A row holds the inputs of
            one output, as in `torch.nn.Linear`. Without the first dim for one matrix.
        scales: scale of each block, ``(L, rows / rows of a block, columns / columns of a block)``, rounded up.
        format: name of a format in `maxmoe.quantization.FORMATS`.
        zeros: zero points, uint8, with the shape of the scales, for "int4"; None for 8.
        columns: number of columns of the matrices; None for that of all codes in a row.
        is_transposed: whether the shape is ``(L, columns, rows)`` instead of ``(L, rows, columns)``.
        dtype: dtype that the stack is dequantized to by default.

    Raises:
        ValueError: for tensors that do not fit the format or each other, and for scales that are not finite.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    format: str
    is_transposed: bool

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(  # noqa: D102  # the class says what it takes
        cls: "type[QuantizedStack]",
        codes: Tensor,
        scales: Tensor,
        *,
        format: str,
        zeros: Tensor | None = None,
        columns: int | None = None,
        is_transposed: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> "QuantizedStack":
        known = format_named(format)
        if columns is None:
            columns = codes.shape[-1] * 8 // known.bits if codes.dim() else 0
        check_int("columns", columns, at_least=0)
        check_dtype(dtype)
        check_parts(known, codes, scales, zeros, columns)
        return _wrapped(codes, scales, zeros, (format, columns, is_transposed, dtype))

    @property
    def columns(self) -> int:
        """Number of columns of the matrices, the input features."""
        return self.shape[-2 if self.is_transposed else -1]

    @property
    def rows(self) -> int:
        """Number of rows of the matrices, the output features."""
        return self.shape[-1 if self.is_transposed else -2]

    @property
    def rows_per_scale(self) -> int:
        """Number of rows of a block."""
        return format_named(self.format).rows_per_scale

    @property
    def columns_per_scale(self) -> int:
        """Number of columns of a block."""
        return format_named(self.format).block_columns(self.columns, self.scales.shape[-1])

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Number of bytes of codes, scales and zero points."""
        return sum(part.nbytes for part in self.parts().values())

    @property
    def requires_grad(self) -> bool:
        """False: quantized weights are frozen."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> "QuantizedStack":
        """Raise if a gradient is asked for, because quantized weights are frozen."""
        if requires_grad:
            raise RuntimeError(
                f"weights quantized as {self.format} are frozen and have no gradient: use "
                "nn.Parameter(stack, requires_grad=False), and train adapters beside them"
            )
        return self

    @property
    def data(self) -> "QuantizedStack":
        """The stack without a history; it shares the memory."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        raise AttributeError(
            f"data of weights quantized as {self.format} cannot be replaced: use stack.copy_(other), or set the "
            "parameter of the module"
        )

    def share_memory_(self) -> "QuantizedStack":
        """Move codes, scales and zero points to shared memory, for other processes."""
        for part in self.parts().values():
            part.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """Return whether codes, scales and zero points are in shared memory."""
        return all(part.is_shared() for part in self.parts().values())  # type: ignore[no-untyped-call]

    def storage(self) -> Any:
        """Raise, because a stack has several storages. safetensors asks for it; tracing asks for `untyped_storage`."""
        raise RuntimeError(  # safetensors takes a NotImplementedError for that of a tensor without memory
            f"weights quantized as {self.format} are several tensors without one storage, as safetensors and "
            "save_pretrained need it: use torch.save(model.state_dict(), path), or maxmoe.integrations.checkpoint."
            "write_checkpoint"
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weights as an ordinary tensor.

        Each is the float32 product of code and scale, rounded once.

        Args:
            dtype: dtype of the result; None for that of the stack.

        Returns:
            Tensor with the shape of the stack.
        """
        dtype = self.dtype if dtype is None else dtype
        check_dtype(dtype)
        if not self.numel():
            return torch.empty_strided(self.shape, self.stride(), dtype=dtype, device=self.device)
        parts = {name: part if part.dim() == 3 else part.unsqueeze(0) for name, part in self.parts().items()}
        matrices: Tensor = torch.ops.maxmoe.dequantize(
            parts["codes"], parts["scales"], parts.get("zeros"), self.format, self.columns, dtype
        )
        matrices = matrices.view(*self.codes.shape[:-1], self.columns)
        return matrices.mT if self.is_transposed else matrices

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that the stack holds, by the names of its attributes."""
        parts = {"codes": self.codes, "scales": self.scales}
        return parts if self.zeros is None else {**parts, "zeros": self.zeros}

    def with_parts(
        self,
        function: Callable[[Tensor], Tensor] = lambda part: part,
        *,
        columns: int | None = None,
        is_transposed: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> "QuantizedStack":
        """Return a stack with the results of a function of codes, scales and zeros, and other values as given."""
        parts = {name: function(part) for name, part in self.parts().items()}
        return _wrapped(
            parts["codes"],
            parts["scales"],
            parts.get("zeros"),
            (
                self.format,
                self.columns if columns is None else columns,
                self.is_transposed if is_transposed is None else is_transposed,
                self.dtype if dtype is None else dtype,
            ),
        )

    def of_parts(self, parts: Mapping[str, Tensor]) -> "QuantizedStack":
        """Return a stack in the layout of this one with the codes, scales and zero points of all or some experts.

        A part of the rows or columns must consist of whole blocks.
        """
        codes, columns = parts["codes"], self.columns
        if codes.shape[-1] != self.codes.shape[-1]:
            columns = codes.shape[-1] * 8 // format_named(self.format).bits
        return _wrapped(
            codes, parts["scales"], parts.get("zeros"), (self.format, columns, self.is_transposed, self.dtype)
        )

    def __tensor_flatten__(self) -> "tuple[list[str], _Description]":
        return list(self.parts()), (self.format, self.columns, self.is_transposed, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], description: "_Description", size: Any, stride: Any
    ) -> "QuantizedStack":
        return _wrapped(parts["codes"], parts["scales"], parts.get("zeros"), description)

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedStack":
        if id(self) not in memo:
            stack = self.with_parts(torch.clone)
            memo[id(self)] = nn.Parameter(stack, requires_grad=False) if isinstance(self, nn.Parameter) else stack
        copied: QuantizedStack = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        description = (self.format, self.columns, self.is_transposed, self.dtype)
        return rebuild, (self.codes, self.scales, self.zeros, *description, isinstance(self, nn.Parameter))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        is_parameter = "Parameter, " if isinstance(self, nn.Parameter) else ""
        return (
            f"QuantizedStack({is_parameter}shape={tuple(self.shape)}, format={self.format!r}, block="
            f"{self.rows_per_scale} x {self.columns_per_scale}, nbytes={self.nbytes}, dtype={self.dtype}, "
            f"device='{self.device}')"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        compute = OPERATORS.get(operator)
        if compute is None:
            stack = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
            raise NotImplementedError(
                f"{operator} takes no weights quantized as {stack.format}, of shape {tuple(stack.shape)}: "
                "stack.dequantize() returns a tensor"
            )
        return compute(*args, **(kwargs or {}))


# Format, columns, is_transposed and dtype.
_Description = tuple[str, int, bool, torch.dtype]


def _wrapped(codes: Tensor, scales: Tensor, zeros: Tensor | None, description: _Description) -> QuantizedStack:
    """Return a stack with tensors that fit each other."""
    format, columns, is_transposed, dtype = description
    *experts, rows, _ = codes.shape
    strides = [*[rows * columns] * len(experts), columns, 1]
    shape = [*experts, rows, columns]
    if is_transposed:
        shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
    stack: QuantizedStack = make_wrapper_subclass(QuantizedStack, shape, strides, dtype, codes.device)
    stack.codes, stack.scales, stack.zeros = codes, scales, zeros
    stack.format, stack.is_transposed = format, is_transposed
    return stack


def rebuild(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    format: str,
    columns: int,
    is_transposed: bool,
    dtype: torch.dtype,
    is_parameter: bool,
) -> QuantizedStack:
    """Return a pickled stack, with all checks."""
    stack = QuantizedStack(
        codes, scales, format=format, zeros=zeros, columns=columns, is_transposed=is_transposed, dtype=dtype
    )
    return nn.Parameter(stack, requires_grad=False) if is_parameter else stack  # type: ignore[return-value]


torch.serialization.add_safe_globals([rebuild])  # for torch.load(weights_only=True)
