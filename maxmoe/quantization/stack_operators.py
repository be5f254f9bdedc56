"""Operators of torch on quantized stacks: copies, views and indexing; importing this module registers them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maxmoe.quantization.checks import check_dtype, check_values
from maxmoe.quantization.formats import FORMATS
from maxmoe.quantization.stack import OPERATORS, QuantizedStack

__all__ = ["OPERATORS"]

aten = torch.ops.aten


def _computes(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function for operators of torch."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS.update(dict.fromkeys(operators, function))
        return function

    return register


@_computes(aten.detach.default)
def _detach(stack: QuantizedStack) -> QuantizedStack:
    return stack.with_parts(torch.detach)


@_computes(aten.alias.default)
def _alias(stack: QuantizedStack) -> QuantizedStack:
    return stack.with_parts()


@_computes(aten.view.default)
def _view(stack: QuantizedStack, size: list[int]) -> QuantizedStack:
    if list(size) != list(stack.shape):
        raise _error(stack, f"a view of shape {tuple(size)}")
    return stack.with_parts()


@_computes(aten.clone.default)
def _clone(stack: QuantizedStack, memory_format: torch.memory_format | None = None) -> QuantizedStack:
    """Copy codes and scales; their order in memory does not depend on the dims of the stack."""
    return stack.with_parts(torch.clone)


@_computes(aten._to_copy.default)
def _to_copy(
    stack: QuantizedStack,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **options: Any,
) -> QuantizedStack:
    """Change the dtype that the stack is dequantized to, sharing memory, or copy to a device."""
    check_dtype(dtype or stack.dtype)
    if device is None or torch.device(device) == stack.device:
        return stack.with_parts(torch.clone if dtype in (None, stack.dtype) else Tensor.detach, dtype=dtype)
    return stack.with_parts(lambda part: part.to(device, non_blocking=non_blocking), dtype=dtype)


@_computes(aten.empty_like.default)
def _empty_like(
    stack: QuantizedStack, dtype: torch.dtype | None = None, device: torch.device | None = None, **options: Any
) -> QuantizedStack:
    check_dtype(dtype or stack.dtype)
    return stack.with_parts(lambda part: torch.empty_like(part, device=device), dtype=dtype)


@_computes(aten.new_empty.default)
def _new_empty(
    stack: QuantizedStack, size: list[int], dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> QuantizedStack:
    """Return a stack of another size, in the same layout and with the same block."""
    if len(size) not in (2, 3):
        raise _error(stack, f"an empty stack of shape {tuple(size)}")
    *experts, rows, columns = [*size[:-2], size[-1], size[-2]] if stack.is_transposed else size
    format = FORMATS[stack.format]
    block = stack.columns_per_scale if format.has_groups else format.columns_per_scale or max(1, columns)
    sizes = {
        "codes": (*experts, rows, format.bytes_per_row(columns)),
        "scales": (*experts, -(-rows // format.rows_per_scale), -(-columns // block)),
    }

    def empty(part: Tensor) -> Tensor:
        return part.new_empty(sizes["codes" if part is stack.codes else "scales"], device=device)

    return stack.with_parts(empty, columns=columns, dtype=dtype)


@_computes(aten.copy_.default)
def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    for stack, other in ((target, source), (source, target)):
        if not isinstance(other, QuantizedStack):
            assert isinstance(stack, QuantizedStack)
            raise _error(stack, f"a copy {'from' if stack is target else 'to'} a tensor that is not quantized")
    assert isinstance(target, QuantizedStack) and isinstance(source, QuantizedStack)
    for name, described in (("format", _format_of), ("shape", _shape_of), ("scales", _scales_of)):
        if described(target) != described(source):
            raise ValueError(
                f"{name} of a quantized stack that is copied must be {described(target)}, got {described(source)}"
            )
    if not source.is_meta:  # once for all: load_state_dict copies
        check_values(source.scales, source.zeros)
    for name, part in target.parts().items():
        part.copy_(source.parts()[name], non_blocking=non_blocking)
    return target


@_computes(aten._foreach_lerp_.Scalar)
def _foreach_lerp_(starts: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Interpolate in place, as `torch.optim.swa_utils` averages models: stacks are frozen and stay as they are."""
    pairs = [pair for pair in zip(starts, ends, strict=True) if not _are_equal_stacks(*pair)]
    stack = next((each for pair in pairs for each in pair if isinstance(each, QuantizedStack)), None)
    if stack is not None:
        raise _error(stack, "an average with other weights")
    if pairs:
        aten._foreach_lerp_.Scalar([start for start, _ in pairs], [end for _, end in pairs], weight)


def _are_equal_stacks(one: Tensor, other: Tensor) -> bool:
    if not isinstance(one, QuantizedStack) or not isinstance(other, QuantizedStack):
        return False
    if any(described(one) != described(other) for described in (_format_of, _shape_of, _scales_of)):
        return False
    return all(torch.equal(part, other.parts()[name]) for name, part in one.parts().items())


def _format_of(stack: QuantizedStack) -> str:
    return stack.format + (" with zero points" if stack.zeros is not None else "")


def _shape_of(stack: QuantizedStack) -> str:
    return f"{tuple(stack.shape)}{', transposed' if stack.is_transposed else ''}"


def _scales_of(stack: QuantizedStack) -> str:
    return f"{stack.scales.dtype} {tuple(stack.scales.shape)}"


@_computes(aten.transpose.int)
def _transpose(stack: QuantizedStack, dim0: int, dim1: int) -> QuantizedStack:
    dims = {_dim(stack, dim0), _dim(stack, dim1)}
    if len(dims) == 1:
        return stack.with_parts()
    if dims != {stack.dim() - 2, stack.dim() - 1}:
        raise _error(stack, f"a transposition of dims {dim0} and {dim1}")
    return stack.with_parts(is_transposed=not stack.is_transposed)


@_computes(aten.t.default)
def _t(stack: QuantizedStack) -> QuantizedStack:
    return _transpose(stack, 0, 1)  # type: ignore[no-any-return]


@_computes(aten.slice.Tensor)
def _slice(
    stack: QuantizedStack, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedStack:
    dim = _dim(stack, dim)
    begin, stop, step = slice(start, end, step).indices(stack.shape[dim])
    stop = max(begin, stop)
    if _is_expert_dim(stack, dim):
        return stack.with_parts(lambda part: part[begin:stop:step])
    if (dim == stack.dim() - 2) != stack.is_transposed:
        return _rows(stack, slice(begin, stop, step))
    return _columns(stack, slice(begin, stop, step))


def _rows(stack: QuantizedStack, chosen: slice) -> QuantizedStack:
    block = stack.rows_per_scale
    _check_borders(stack, "rows", chosen, block, stack.rows)
    of_scales = slice(chosen.start // block, -(-chosen.stop // block), chosen.step)

    def part_of(part: Tensor) -> Tensor:
        return part[..., chosen if part is stack.codes else of_scales, :]

    return stack.with_parts(part_of)


def _columns(stack: QuantizedStack, chosen: slice) -> QuantizedStack:
    block, columns = stack.columns_per_scale, stack.columns
    if stack.scales.shape[-1] <= 1 and stack.codes.shape[-1] == columns:
        block = 1  # one scale for the whole row, and a byte for each column
        of_scales = slice(None)
    else:
        of_scales = slice(chosen.start // block, -(-chosen.stop // block))
    _check_borders(stack, "columns", chosen, block, columns)
    if chosen.step != 1:
        raise _error(stack, f"a slice of columns with step {chosen.step}")
    bytes_of = stack.codes.shape[-1]
    of_codes = slice(chosen.start * bytes_of // columns, -(-chosen.stop * bytes_of // columns)) if columns else chosen

    def part_of(part: Tensor) -> Tensor:
        return part[..., of_codes if part is stack.codes else of_scales]

    return stack.with_parts(part_of, columns=chosen.stop - chosen.start)


def _check_borders(stack: QuantizedStack, name: str, chosen: slice, block: int, size: int) -> None:
    if chosen.step != 1 and block > 1:
        raise _error(stack, f"a slice of {name} with step {chosen.step}, where a scale is of {block} {name},")
    for border in (chosen.start, chosen.stop):
        if border % block and border != size:
            raise ValueError(
                f"a slice of {name} of weights quantized as {stack.format} must begin and end at multiples of {block}, "
                f"the {name} of a scale, got {border} of {size}"
            )


@_computes(aten.select.int)
def _select(stack: QuantizedStack, dim: int, index: int) -> QuantizedStack:
    if not _is_expert_dim(stack, _dim(stack, dim)):
        raise _error(stack, f"an index in dim {dim}")
    return stack.with_parts(lambda part: part[index])


@_computes(aten.unbind.int)
def _unbind(stack: QuantizedStack, dim: int = 0) -> list[QuantizedStack]:
    return [_select(stack, dim, index) for index in range(stack.shape[dim])]


@_computes(aten.split.Tensor)
def _split(stack: QuantizedStack, size: int, dim: int = 0) -> list[QuantizedStack]:
    starts = range(0, stack.shape[dim], size) if stack.shape[dim] else (0,)
    return [_slice(stack, dim, start, start + size) for start in starts]


@_computes(aten.split_with_sizes.default)
def _split_with_sizes(stack: QuantizedStack, sizes: list[int], dim: int = 0) -> list[QuantizedStack]:
    ends = [sum(sizes[: count + 1]) for count in range(len(sizes))]
    return [_slice(stack, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


@_computes(aten.index_select.default)
def _index_select(stack: QuantizedStack, dim: int, index: Tensor) -> QuantizedStack:
    if not _is_expert_dim(stack, _dim(stack, dim)):
        raise _error(stack, f"an index in dim {dim}")
    return stack.with_parts(lambda part: part.index_select(0, index))


@_computes(aten.index.Tensor)
def _index(stack: QuantizedStack, indices: list[Tensor | None]) -> QuantizedStack:
    if stack.dim() != 3 or indices[0] is None or any(index is not None for index in indices[1:]):
        raise _error(stack, "an index in another dim than that of the experts")
    if indices[0].dim() != 1:
        raise _error(stack, f"an index with {indices[0].dim()} dims")
    return stack.with_parts(lambda part: part[indices[0]])


def _dim(stack: QuantizedStack, dim: int) -> int:
    if not -stack.dim() <= dim < stack.dim():
        raise IndexError(f"dim must be in [{-stack.dim()}, {stack.dim() - 1}], got {dim}")
    return dim % stack.dim()


def _is_expert_dim(stack: QuantizedStack, dim: int) -> bool:
    return stack.dim() == 3 and dim == 0


def _error(stack: QuantizedStack, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what} is not possible with weights quantized as {stack.format}, of shape {tuple(stack.shape)}: "
        "stack.dequantize() returns a tensor"
    )
