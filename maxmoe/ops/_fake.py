"""Fake kernels: shapes and dtypes of the results of every operator, for torch.compile and meta tensors."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maxmoe._torch import argument_names


def _wide(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which operators accumulate."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def _columns(name: str, arguments: dict[str, Any]) -> int:
    """Return the number of columns of the matrices of a projection."""
    tensor: Tensor = arguments[name]
    if arguments.get(f"{name}_format") is None:
        return tensor.shape[2]
    return tensor.shape[1] if arguments.get(f"{name}_is_transposed") else int(arguments.get(f"{name}_columns", 0))


def _expert_ffn_forward(x: Tensor, slots: Tensor, recompute: bool = False, **others: Any) -> tuple[Tensor, ...]:
    width, has_gate, is_apart = _columns("up", others), others.get("gate") is not None, x.device.type != "cpu"
    num_rows = 0 if recompute else slots.shape[0]
    factors = [others.get(f"{name}_a") for name in ("gate", "up", "down")]
    rank = sum(a.shape[2] for a in factors if a is not None)
    widths = (2 * width if has_gate and not is_apart else width, rank, width if has_gate and is_apart else 0)
    return x.new_empty(x.shape), *(x.new_empty(num_rows, columns) for columns in widths)


def _expert_ffn_backward(output_mask: list[bool], x: Tensor, rows: Tensor, **others: Any) -> list[Tensor]:
    def gradient(wanted: bool, tensor: Tensor | None) -> Tensor:
        if not wanted or tensor is None:
            return x.new_empty(0)
        is_transposed = tensor.dim() == 3 and tensor.stride(1) == 1 and tensor.stride(2) != 1
        return x.new_empty(tensor.mT.shape).mT if is_transposed else x.new_empty(tensor.shape)

    names = [name + field for name in ("gate", "up", "down") for field in ("", "_bias", "_a", "_b")]
    tensors = (x, others.get("weights"), *map(others.get, names))
    gradients = [gradient(wanted, tensor) for wanted, tensor in zip(output_mask, tensors, strict=True)]
    gradients[1] = x.new_empty(rows.shape[0] if output_mask[1] else 0, dtype=_wide(x))
    return gradients


def _ragged_plan(
    experts: Tensor,
    num_experts: int,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    max_rows: int | None = None,
    num_rows: int | None = None,
) -> tuple[Tensor, ...]:
    num_groups = num_experts - first_expert if num_local_experts is None else num_local_experts
    if num_rows is None and max_rows is not None and experts.device.type != "cpu":
        num_rows = min(max_rows, experts.numel())
    size = torch.library.get_ctx().new_dynamic_size() if num_rows is None else num_rows
    num_slots = experts.shape[0] * experts.shape[1]
    shapes: list[tuple[Any, ...]] = [(size,), (num_slots,), (num_groups,), ()]
    return tuple(experts.new_empty(shape) for shape in shapes)


def _route(logits: Tensor, top_k: int, **_: object) -> tuple[Tensor, ...]:
    shape, wide = (logits.shape[0], top_k), _wide(logits)
    chosen = logits.new_empty(shape, dtype=torch.int64)
    return logits.new_empty(shape, dtype=wide), chosen, logits.new_empty(logits.shape, dtype=wide)


# Called with keyword arguments. The dispatcher may leave out arguments with the default value of the schema.
_FAKES: dict[str, Callable[..., Any]] = {
    "dequantize": lambda codes, columns, dtype, **_: codes.new_empty((*codes.shape[:2], columns), dtype=dtype),
    "expert_ffn": lambda x, **_: x.new_empty(x.shape),
    "expert_ffn_forward": _expert_ffn_forward,
    "expert_ffn_backward": _expert_ffn_backward,
    "gmm": lambda lhs, **others: lhs.new_empty(lhs.shape[0], _columns("rhs", others)),
    "linear": lambda x, weight, out_dtype=None, **_: x.new_empty(
        x.shape[0], weight.shape[0], dtype=out_dtype or _wide(x, weight)
    ),
    "ragged_dot": lambda a, index, **_: a.new_empty(index.shape[0], dtype=_wide(a)),
    "ragged_gather": lambda x, index, **_: x.new_empty(index.shape[0], x.shape[1]),
    "ragged_gather_reduce": lambda rows, index, group_size, **_: rows.new_empty(
        index.shape[0] // group_size, rows.shape[1]
    ),
    "ragged_plan": _ragged_plan,
    "ragged_scatter_add": lambda rows, num_rows, **_: rows.new_empty(num_rows, rows.shape[1]),
    "ragged_sort": lambda x, slots, **_: x.new_empty(slots.shape[0], x.shape[1]),
    "ragged_unsort": lambda rows, row_of_slot, top_k, **_: rows.new_empty(row_of_slot.shape[0] // top_k, rows.shape[1]),
    "route": _route,
    "router_entropy": lambda probabilities, **_: probabilities.new_empty((), dtype=_wide(probabilities)),
    "route_backward": lambda logits, **_: torch.empty_like(logits, memory_format=torch.contiguous_format),
    "tgmm": lambda lhs, rhs, num_local_groups, **_: lhs.new_empty(num_local_groups, lhs.shape[1], rhs.shape[1]),
}


def _checked(operator: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fake kernel that checks devices, because a single meta tensor makes the dispatcher call it."""
    names = argument_names(getattr(torch.ops.maxmoe, operator).default)

    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.onnx.is_in_onnx_export():
            raise RuntimeError(
                f"maxmoe::{operator} cannot be exported to ONNX, which has no operators for routing and grouped matrix "
                "products: save the program of torch.export.export with torch.export.save"
            )
        arguments = dict(zip(names, args, strict=False)) | kwargs
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        first, *_ = tensors
        for name, tensor in tensors.items():
            if tensor.device != tensors[first].device:
                raise ValueError(
                    f"maxmoe::{operator}: {name} must be on the device of {first} ({tensors[first].device}), "
                    f"got {tensor.device}"
                )
        return fake(**arguments)

    return checked


for _operator, _fake in _FAKES.items():
    torch.library.register_fake(f"maxmoe::{_operator}", _checked(_operator, _fake))
