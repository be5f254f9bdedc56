"""Meshes of a number of ranks: all factorisations over the axes that rules know."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from maxmoe.planning.many_meshes import Sizes
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh
from maxmoe.sharding.rules import LogicalRules

# From the axis with the fewest bytes to the one with the most, so that the last ones are within a node. Axes of rules of
# one's own come first.
ORDER = (STAGE_AXIS, "data", "fsdp", "fsdp_transpose", "context", "expert", "tensor")


def ordered_axes(rules: LogicalRules) -> tuple[str, ...]:
    """Return the axes of rules, in the order in which the searched meshes have them: the outermost first."""
    axes = dict.fromkeys(axis for _, axes in rules for axis in axes)
    others = [axis for axis in axes if axis not in ORDER]
    return (*others, *(axis for axis in ORDER if axis in axes))


def factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `count` positive integers whose product is `number`, each once.

    Args:
        number: positive integer.
        count: number of factors.
    """
    if count == 0:
        if number == 1:
            yield ()
        return
    if count == 1:
        yield (number,)
        return
    for factor in _divisors(number):
        for others in factorisations(number // factor, count - 1):
            yield (factor, *others)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


@dataclass(frozen=True)
class Candidates:
    """Meshes that have the same axes larger than one, each with a number of micro-batches.

    Args:
        sizes: ``(N,)``, int64, sizes of the axes larger than one, the outermost first.
        num_micro_batches: ``(N,)``, int64; one without pipeline stages.
    """

    sizes: dict[str, Tensor]
    num_micro_batches: Tensor

    def __len__(self) -> int:
        return len(self.num_micro_batches)

    @property
    def has_stages(self) -> bool:
        """Whether the meshes have an axis `stage`."""
        return STAGE_AXIS in self.sizes

    @property
    def mesh(self) -> Mesh:
        """The meshes, planned at once."""
        return Mesh.planned({axis: Sizes(sizes) for axis, sizes in self.sizes.items()})

    def select(self, mask: Tensor) -> "Candidates":
        """Return some of the meshes."""
        sizes = {axis: sizes[mask] for axis, sizes in self.sizes.items()}
        return replace(self, sizes=sizes, num_micro_batches=self.num_micro_batches[mask])

    def mesh_sizes(self, index: int) -> dict[str, int]:
        """Return the sizes of one mesh by axis."""
        return {axis: int(sizes[index]) for axis, sizes in self.sizes.items()}

    def product(self, axes: Sequence[str]) -> Tensor:
        """Return the product of the sizes of some axes; an absent axis counts one."""
        result = torch.ones_like(self.num_micro_batches)
        for axis in axes:
            result = result * self.sizes.get(axis, torch.ones_like(result))
        return result


def candidates(world_size: int, axes: Sequence[str], max_stages: int) -> Iterator[tuple[Candidates, int]]:
    """Yield the meshes of a number of ranks, those with the same axes larger than one together.

    Args:
        world_size: number of ranks.
        axes: axes, the outermost first.
        max_stages: largest size of the axis `stage`.

    Yields:
        Meshes, and the number of meshes that have too many stages.
    """
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for sizes in factorisations(world_size, len(axes)):
        present = tuple(axis for axis, size in zip(axes, sizes, strict=True) if size > 1)
        groups.setdefault(present, []).append(tuple(size for size in sizes if size > 1))
    for present, rows in groups.items():
        table = torch.tensor(rows, dtype=torch.int64).view(len(rows), len(present))
        sizes = {axis: table[:, column] for column, axis in enumerate(present)}
        excluded = 0
        if STAGE_AXIS in sizes:
            fits = sizes[STAGE_AXIS] <= max_stages
            excluded = int((~fits).sum())
            sizes = {axis: values[fits] for axis, values in sizes.items()}
            rows = rows[: int(fits.sum())]
        yield Candidates(sizes, torch.ones(len(rows), dtype=torch.int64)), excluded


def with_micro_batches(meshes: Candidates, rows: Tensor) -> Candidates:
    """Repeat each mesh with stages for every number of micro-batches that 1F1B can run: 1, 2, 4, ... per stage.

    Args:
        meshes: meshes with an axis `stage`.
        rows: ``(N,)``, number of sequences of a rank.
    """
    stages = meshes.sizes[STAGE_AXIS]
    index, numbers = [], []
    times = 1
    while bool(((fits := stages * times <= rows)).any()):
        index.append(fits.nonzero()[:, 0])
        numbers.append((stages * times)[fits])
        times *= 2
    if not index:
        return meshes.select(torch.zeros(len(meshes), dtype=torch.bool))
    repeated = meshes.select(torch.cat(index))
    return replace(repeated, num_micro_batches=torch.cat(numbers))
