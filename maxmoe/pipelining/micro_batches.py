"""Cuts the inputs and targets of a step into micro-batches."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxmoe._torch import tree_leaves, tree_map


class MicroBatch(NamedTuple):
    """Inputs and targets of one micro-batch, and other arguments of the model, which every stage takes."""

    inputs: Tensor
    targets: Any
    options: dict[str, Any]


def split(inputs: Tensor, targets: Any, options: dict[str, Any], count: int) -> list[MicroBatch]:
    """Cut all tensors ``(B, ...)`` of a batch along the first dim, as `torch.tensor_split`; see `Pipeline.step`."""
    if not isinstance(inputs, Tensor) or inputs.dim() == 0:
        raise TypeError(f"inputs must be a tensor with a batch dim, got {type(inputs).__name__}")
    num_rows = len(inputs)

    def is_cut(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and len(value) == num_rows

    for name, value in {"inputs": inputs, "targets": targets, **options}.items():
        for leaf in filter(lambda leaf: isinstance(leaf, Tensor), tree_leaves(value)):
            if leaf.requires_grad:
                raise ValueError(f"{name} must not require a gradient, got one of shape {tuple(leaf.shape)} that does")
            if name == "targets" and not is_cut(leaf):
                raise ValueError(f"targets must have {num_rows} rows, as the inputs, got the shape {tuple(leaf.shape)}")

    def part(index: int, value: Any) -> Any:
        return torch.tensor_split(value, count)[index] if is_cut(value) else value

    batch = inputs, targets, options
    return [MicroBatch(*tree_map(partial(part, index), batch)) for index in range(count)]


def facts_of(inputs: Tensor, targets: Any, options: dict[str, Any], device_type: str) -> dict[str, str]:
    """Describe what all stages must agree on: shapes and dtypes of inputs and targets, and autocast."""
    named = {"the inputs": inputs, "the targets": targets}
    named |= {f"the option {name}": value for name, value in sorted(options.items())}
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return {"autocast": str(autocast), **{name: str(tree_map(_described, value)) for name, value in named.items()}}


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}, {value.dtype}" + ", requires_grad" * value.requires_grad
    # The text of another object may have its address.
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__
