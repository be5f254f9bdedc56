"""Batches of any form: the tensors in them, their sizes, and their micro-batches."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in mappings, lists, tuples and dataclasses, with their place as in ``.logits`` or ``[0]``."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield from tensors_in(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{index}]")
    elif _is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from tensors_in(getattr(value, item.name), f"{path}.{item.name}")


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to the tensors of a copy of mappings, lists, tuples and dataclasses, of the same types."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        mapping = copy.copy(value)
        for key, item in value.items():
            mapping[key] = map_tensors(function, item)
        return mapping
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, item) for item in value)
    if _is_dataclass(value):
        instance = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(instance, field.name, map_tensors(function, getattr(value, field.name)))
        return instance
    return value


def batch_sizes(batch: object) -> Iterator[tuple[str, int]]:
    """Yield the names of the dims of the largest tensor of a batch and their sizes."""
    tensors = [tensor for _, tensor in tensors_in(batch) if tensor.ndim]
    if not tensors:
        return
    shape = max(tensors, key=lambda tensor: tensor.ndim).shape
    yield "batch size", shape[0]
    if len(shape) > 1:
        yield "sequence length", shape[1]
        yield "number of tokens", shape[0] * shape[1]


def have_same_tensors(one: Any, other: Any) -> bool:
    """Return whether two batches have the same tensors in the same places."""
    first, second = dict(tensors_in(one)), dict(tensors_in(other))
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
        return map_tensors(lambda tensor: tensor.tensor_split(count)[number] if tensor.ndim else tensor, batch)

    return [part(number) for number in range(count)]


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
