"""Which entries of the tensors of one process a rank has: by name, by the layout of a `DTensor`, or by their values."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from maxmoe._torch.wrappers import WRAPPED_NAMES

Shape = tuple[int, ...]
Block = tuple[slice, ...]


@dataclass
class Entries:
    """Entries of a tensor on one rank."""

    values: Tensor
    shape: Shape  # of the whole tensor for a DTensor, otherwise of `values`
    indices: Tensor | None = None  # flat index of each entry in the whole DTensor; None for another tensor

    @classmethod
    def of(cls, tensor: Tensor) -> "Entries":
        """Copy this rank's entries of a tensor. Partial sums of a `DTensor` are reduced first."""
        tensor, indices = tensor.detach(), None
        if isinstance(tensor, DTensor):
            placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            numbers = torch.arange(tensor.numel()).view(tensor.shape)
            indices = distribute_tensor(numbers, tensor.device_mesh, placements, src_data_rank=None).to_local().cpu()
            local = tensor.redistribute(placements=placements).to_local()
        else:
            local = tensor if tensor.layout == torch.strided else tensor.to_dense()
        return cls(local.cpu().clone(), tuple(tensor.shape), indices)


def locate(parts: Sequence[Entries], whole: Tensor) -> list[tuple[list[Tensor], float]]:
    """Find the entries of each rank in a whole tensor.

    Returns for each rank the flat indices ``(N,)`` of its entries, once for each block that is closest to their values,
    none if no block has their shape; and their largest difference from the whole tensor there.
    """
    numbers, shapes = torch.arange(whole.numel()).view(whole.shape), [part.values.shape for part in parts]
    found = []
    for order, part in enumerate(parts):
        choices: list[Tensor] = []
        if part.shape == whole.shape:
            choices = [numbers if part.indices is None else part.indices]
        elif part.indices is None:
            choices = [numbers[block] for block in blocks(shapes, order, whole.shape)]
        errors = [distance(part.values, whole.flatten()[indices]) for indices in choices]
        error = min(errors, default=math.inf)
        candidates = [indices.flatten() for indices, own in zip(choices, errors, strict=True) if own == error]
        if error > 0 and part.indices is None and (closest := _selection(part.values, whole)) is not None:
            difference = distance(part.values, whole.flatten()[closest])
            if difference < error:
                candidates, error = [closest.flatten()], difference
        found.append((candidates, error))
    return found


def _selection(values: Tensor, whole: Tensor) -> Tensor | None:
    """Return the flat indices of the closest slices along the dim that is smaller, such as every second sequence."""
    if not 1 < values.ndim == whole.ndim or not values.numel():  # numbers of a vector are near each other by chance
        return None
    dims = [dim for dim, sizes in enumerate(zip(values.shape, whole.shape, strict=True)) if sizes[0] != sizes[1]]
    if len(dims) != 1 or values.numel() > whole.numel():
        return None
    mine, others = (tensor.double().movedim(dims[0], 0).flatten(1) for tensor in (values, whole))
    closest = torch.cdist(mine, others, p=math.inf).argmin(1)
    return torch.arange(whole.numel()).view(whole.shape).index_select(dims[0], closest)


def blocks(shapes: Sequence[Shape], rank: int, whole: Shape) -> Iterator[Block]:
    """Yield the blocks of a whole tensor that have the shape of a rank's part, the block after lower ranks first."""
    part = shapes[rank]
    if len(part) != len(whole) or any(size > limit for size, limit in zip(part, whole, strict=True)):
        return
    starts = []
    for dim, (size, limit) in enumerate(zip(part, whole, strict=True)):
        after_others = sum(shape[dim] for shape in shapes[:rank] if len(shape) == len(whole))
        choices = dict.fromkeys([after_others, *range(0, limit - size + 1, max(size, 1)), limit - size])
        starts.append([start for start in choices if start + size <= limit])
    for start in itertools.product(*starts):
        yield tuple(slice(begin, begin + size) for begin, size in zip(start, part, strict=True))


def missing_entries(indices: Sequence[Tensor], size: int) -> int:
    """Return how many entries of a tensor no rank has."""
    covered = torch.zeros(size, dtype=torch.bool)
    for index in indices:
        covered[index] = True
    return int(size - covered.sum())


def distance(part: Tensor, whole: Tensor) -> float:
    """Return the largest difference of two tensors of one shape.

    Two NaNs, and infinities of the same sign, are equal. All other differences of what is not finite are infinite.
    """
    if not part.numel():
        return 0.0
    one, other = part.double(), whole.double()
    are_equal = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().masked_fill(are_equal, 0.0).nan_to_num(nan=math.inf, posinf=math.inf).max())


def largest_of(tensor: Tensor) -> float:
    """Return the largest absolute value of the finite entries of a tensor, 0 if there are none."""
    finite = tensor[tensor.isfinite()].double()
    return float(finite.abs().max()) if finite.numel() else 0.0


def matching_names(wrapped: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the name in one process of each name on a rank, where wrappers may have added prefixes.

    A name that one process does not have is returned without prefixes.
    """
    known = {_without_wrappers(name): name for name in names}
    return {name: known.get(bare := _without_wrappers(name), bare) for name in wrapped}


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ("module", *WRAPPED_NAMES))  # "module" is of DDP
