"""The part of a tensor that a rank holds, by definition, and comparisons up to a tolerance."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from maxmoe.sharding import Mesh, NamedSharding, PartitionSpec


def part_by_definition(whole: Tensor, spec: PartitionSpec, mesh: Mesh, rank: int | None = None) -> Tensor:
    """Split one dim after the other, for one axis after the other; `rank` is the calling rank if None."""
    rank = mesh.rank if rank is None else rank
    assert rank is not None
    place = dict(zip(mesh.sizes, list(itertools.product(*map(range, mesh.sizes.values())))[rank], strict=True))
    for dim, axes in enumerate(spec):
        for axis in axes:
            if axis in mesh.sizes:
                whole = whole.tensor_split(mesh.sizes[axis], dim)[place[axis]]
    return whole


def assert_same(
    actual: Tensor, expected: Tensor, name: str = "", *, scale: Tensor | float | None = None, tolerance: float = 1e-12
) -> None:
    """Compare all entries with a tolerance relative to the largest of `expected`, or of `scale`."""
    actual, expected = actual.detach(), expected.detach()
    assert type(actual) is type(expected) is Tensor, name
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (name, actual.shape, expected.shape)
    if expected.numel():
        error, largest = float((actual - expected).abs().max()), float(expected.abs().max())
        if scale is not None:
            largest = float(scale.detach().abs().max() if isinstance(scale, Tensor) else scale) or largest
        assert error <= tolerance * largest, f"{name}: {error} on a scale of {largest}"


def assert_part(
    actual: Any, whole: Tensor, sharding: NamedSharding, name: str, *, tolerance: float = 1e-12, floor: float = 0.0
) -> None:
    """Compare this rank's part, on the scale of the whole tensor, and `floor` above it."""
    assert isinstance(actual, DTensor) and actual.placements == sharding.placements, name
    assert actual.shape == whole.shape, name
    part = part_by_definition(whole, sharding.spec, sharding.mesh)
    scale = float(whole.detach().abs().max()) + floor if whole.numel() else None
    assert_same(actual.to_local(), part, name, scale=scale, tolerance=tolerance)


SHAPE = (8, 16)


def whole_tensor(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def laid(whole: Tensor, mesh: Mesh, spec: PartitionSpec) -> DTensor:
    """This rank's part by definition, as a leaf."""
    part = part_by_definition(whole, spec, mesh).contiguous()
    placements = NamedSharding(mesh, spec).placements
    return DTensor.from_local(part, mesh.device_mesh, placements, run_check=False).detach().requires_grad_()
