"""Which entries of a whole tensor a rank holds."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

Shape = tuple[int, ...]
Block = tuple[slice, ...]


def indices_of(tensor: DTensor) -> Tensor:
    """Return the flat indices, in the whole tensor, of the entries of this rank's shard, in the shape of the shard."""
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return distribute_tensor(numbers, tensor.device_mesh, placements, src_data_rank=None).to_local().cpu()


def local_of(tensor: Tensor) -> Tensor:
    """Return a copy of this rank's entries of a tensor. Partial sums of a `DTensor` are reduced first."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        tensor = tensor.redistribute(placements=placements).to_local()
    return (tensor if tensor.layout == torch.strided else tensor.to_dense()).cpu().clone()


def indices_of_block(shape: Sequence[int], block: Block) -> Tensor:
    """Return the flat indices of the entries of a block of a tensor with a shape."""
    return torch.arange(torch.Size(shape).numel()).view(tuple(shape))[block]


def blocks(shapes: Sequence[Shape], rank: int, whole: Shape) -> Iterator[Block]:
    """Yield the blocks of a whole tensor that have the shape of a rank's part, those after lower ranks first.

    Args:
        shapes: shapes of the parts of all ranks.
        rank: the rank whose part is looked for.
        whole: shape of the whole tensor.
    """
    part = shapes[rank]
    if len(part) != len(whole) or any(size > limit for size, limit in zip(part, whole, strict=True)):
        return
    starts = []
    for dim, (size, limit) in enumerate(zip(part, whole, strict=True)):
        after_others = sum(shape[dim] for shape in shapes[:rank] if len(shape) == len(whole))
        aligned = range(0, limit - size + 1, max(size, 1))
        starts.append(
            [start for start in dict.fromkeys([after_others, *aligned, limit - size]) if start + size <= limit]
        )
    for start in itertools.product(*starts):
        yield tuple(slice(begin, begin + size) for begin, size in zip(start, part, strict=True))


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


def closest_block(parts: Sequence[Tensor], rank: int, whole: Tensor) -> tuple[Block | None, float]:
    """Return the block of a whole tensor that is closest to a rank's part, and their largest difference."""
    best: tuple[Block | None, float] = (None, float("inf"))
    for block in blocks([tuple(part.shape) for part in parts], rank, tuple(whole.shape)):
        error = distance(parts[rank], whole[block])
        if best[0] is None or error < best[1]:
            best = block, error
        if error == 0:
            break
    return best
