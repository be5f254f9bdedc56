"""Batches of any form: the tensors in them, their sizes, and their micro-batches."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[str, Tensor], Tensor], value: Any, path: str = "") -> Any:
    """Apply a function to the tensors of a copy of mappings, lists, tuples and dataclasses, of the same types.

    The function gets the place of each tensor, as in ``.logits`` or ``[0]``, and the tensor.
    """
    if isinstance(value, Tensor):
        return function(path, value)
    if isinstance(value, MutableMapping):
        mapping = copy.copy(value)
        for key, item in value.items():
            mapping[key] = map_tensors(function, item, f"{path}.{key}")
        return mapping
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip(value._fields, value, strict=True)
        return type(value)(*(map_tensors(function, item, f"{path}.{name}") for name, item in items))
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(function, item, f"{path}[{index}]") for index, item in enumerate(value)])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        instance = copy.copy(value)
        for field in dataclasses.fields(value):
            item = map_tensors(function, getattr(value, field.name), f"{path}.{field.name}")
            object.__setattr__(instance, field.name, item)
        return instance
    return value


def tensors_in(value: Any) -> dict[str, Tensor]:
    """Return the tensors in mappings, lists, tuples and dataclasses by their place."""
    found: dict[str, Tensor] = {}
    map_tensors(lambda path, tensor: found.setdefault(path, tensor), value)
    return found


def batch_sizes(batch: object) -> Iterator[tuple[str, int]]:
    """Yield the names of the dims of the largest tensor of a batch and their sizes."""
    tensors = [tensor for tensor in tensors_in(batch).values() if tensor.ndim]
    if not tensors:
        return
    shape = max(tensors, key=lambda tensor: tensor.ndim).shape
    yield "batch size", shape[0]
    if len(shape) > 1:
        yield "sequence length", shape[1]
        yield "number of tokens", shape[0] * shape[1]


def have_same_tensors(one: Any, other: Any) -> bool:
    """Return whether two batches have the same tensors in the same places."""
    first, second = tensors_in(one), tensors_in(other)
    return first.keys() == second.keys() and all(
        tensor.dtype == second[path].dtype and torch.equal(tensor, second[path]) for path, tensor in first.items()
    )


def micro_batches(batch: Any, count: int) -> list[Any]:
    """Cut the tensors of a batch along their first dim; a list that has this length is one of micro-batches."""
    if count <= 1:
        return [batch]
    if isinstance(batch, list) and len(batch) == count:
        return batch

    def part(number: int) -> Any:
        return map_tensors(lambda _, tensor: tensor.tensor_split(count)[number] if tensor.ndim else tensor, batch)

    return [part(number) for number in range(count)]
