"""Which part of the matrices of a DTensor each rank of its mesh holds."""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch.distributed.tensor import DTensor

from maxmoe.optim.exchange_plan import Part, Range, Stack
from maxmoe.optim.matrix import Matrix
from maxmoe.sharding.named_sharding import NamedSharding


def is_whole(parameter: DTensor) -> bool:
    """Whether every rank holds whole matrices: no axis shards one of the last two dims."""
    return not any(
        size > 1 and _sharded_dim(parameter, axis) >= parameter.dim() - 2
        for axis, size in enumerate(parameter.device_mesh.shape)
    )


def parts_of(parameter: DTensor, matrix: Matrix) -> Iterator[tuple[Stack, list[slice]]]:
    """List the stacks of matrices in a parameter: one, or two with a fused gate.

    Args:
        parameter: sharded in any way.
        matrix: which dims are rows (outputs) and columns (inputs).

    Returns:
        The stack, and which of the rows that a rank holds are of it, by position on the mesh.
    """
    places = itertools.product(*map(range, parameter.device_mesh.shape))
    return _stacks(tuple(parameter.shape), [_ranges(parameter, place) for place in places], matrix)


def planned_stacks(shape: Sequence[int], sharding: NamedSharding, matrix: Matrix) -> list[Stack]:
    """List the stacks of matrices in a parameter on a mesh that may be planned.

    Args:
        shape: over all ranks.
        sharding: of the parameter.
        matrix: which dims are rows (outputs) and columns (inputs).

    Returns:
        One, or two with a fused gate; none where every rank holds whole matrices.
    """
    if sharding.mesh.size(*sharding.spec[-2], *sharding.spec[-1]) == 1:
        return []
    ranks = range(sharding.mesh.num_ranks)
    held = [[(part.start, part.stop) for part in sharding.slices(shape, rank)] for rank in ranks]
    return [stack for stack, _ in _stacks(tuple(shape), held, matrix)]


def _stacks(
    shape: tuple[int, ...], held: Sequence[Sequence[Range]], matrix: Matrix
) -> Iterator[tuple[Stack, list[slice]]]:
    *stacked, _, _ = shape
    output_dim = len(shape) - 3 - matrix.input_dim
    num_outputs, num_inputs = shape[output_dim], shape[matrix.input_dim]
    for half in range(1 if matrix.fused_gate is None else 2):
        parts, slices = [], []
        for ranges in held:
            rows, local = _rows_of_half(ranges[output_dim], num_outputs, half, matrix)
            parts.append(Part(tuple(ranges[: len(stacked)]), rows, ranges[len(shape) + matrix.input_dim]))
            slices.append(local)
        yield Stack((num_outputs // (1 if matrix.fused_gate is None else 2), num_inputs), tuple(parts)), slices


def _rows_of_half(held: Range, num_outputs: int, half: int, matrix: Matrix) -> tuple[Range, slice]:
    """The rows of gate (0) or up (1) among those from start to stop of both, and where they are among these."""
    start, stop = held
    if matrix.fused_gate is None:
        return held, slice(None)
    if matrix.fused_gate == "interleaved":
        offset = (half - start) % 2
        first, count = (start + offset - half) // 2, len(range(start + offset, stop, 2))
        return (first, first + count), slice(offset, None, 2)
    begin = half * num_outputs // 2
    first, last = (min(max(bound, begin), begin + num_outputs // 2) for bound in held)
    return (first - begin, last - begin), slice(first - start, last - start)


def _ranges(parameter: DTensor, coordinates: Sequence[int]) -> list[Range]:
    """The range of every dim that the rank at some coordinates holds."""
    splits: list[list[tuple[int, int, int]]] = [[] for _ in parameter.shape]
    for axis, size in enumerate(parameter.device_mesh.shape):
        dim = _sharded_dim(parameter, axis)
        if dim >= 0:
            strips = getattr(parameter.placements[axis], "split_factor", 1)
            splits[dim].append((size, coordinates[axis], strips))
    return [_range(length, tuple(split)) for length, split in zip(parameter.shape, splits, strict=True)]


def _sharded_dim(parameter: DTensor, axis: int) -> int:
    """The dim that an axis shards; -1 if none. A strided shard is no `Shard` in every version of torch."""
    placement = parameter.placements[axis]
    if placement.is_partial():
        raise ValueError(f"a parameter must not be a partial sum, got the placements {parameter.placements}")
    dim = getattr(placement, "dim", -1)
    return int(dim) % parameter.dim() if dim is not None and not placement.is_replicate() else -1


@cache
def _range(length: int, splits: tuple[tuple[int, int, int], ...]) -> Range:
    """Split a dim as DTensor does, for one axis after the other: (size, coordinate, strips) of each."""
    indices = torch.arange(length)
    for size, coordinate, strips in splits:
        blocks = [strip.chunk(size) for strip in indices.chunk(strips)]
        indices = torch.cat([block[coordinate] if coordinate < len(block) else block[0][:0] for block in blocks])
    if not len(indices):
        return (0, 0)
    first, last = int(indices[0]), int(indices[-1]) + 1
    if last - first != len(indices):
        raise ValueError(f"a rank must hold neighbouring indices of a dim, got {indices.tolist()} of {length}")
    return first, last
