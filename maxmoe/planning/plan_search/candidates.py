"""Meshes of a number of ranks: all factorisations over the axes that rules know."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from maxmoe.planning.many_meshes import in_meshes
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh
from maxmoe.sharding.rules import LogicalRules

# From the axis with the fewest bytes to the one with the most, so that the last ones are within a node. Other axes come
# first.
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
        may_be_one: whether sizes may be one; see `Sizes`.
    """

    sizes: dict[str, Tensor]
    num_micro_batches: Tensor
    may_be_one: bool = False

    def __len__(self) -> int:
        return len(self.num_micro_batches)

    @property
    def has_stages(self) -> bool:
        """Whether the meshes have an axis `stage`."""
        return STAGE_AXIS in self.sizes

    @property
    def mesh(self) -> Mesh:
        """The meshes, planned at once."""
        return Mesh.planned({axis: in_meshes(sizes, is_present=self.may_be_one) for axis, sizes in self.sizes.items()})

    def select(self, mask: Tensor) -> "Candidates":
        """Return some of the meshes."""
        sizes = {axis: sizes[mask] for axis, sizes in self.sizes.items()}
        return replace(self, sizes=sizes, num_micro_batches=self.num_micro_batches[mask])

    def mesh_sizes(self, index: int) -> dict[str, int]:
        """Return the sizes of one mesh by axis."""
        sizes = {axis: int(sizes[index]) for axis, sizes in self.sizes.items()}
        return {axis: size for axis, size in sizes.items() if size > 1}

    def product(self, axes: Sequence[str]) -> Tensor:
        """Return the product of the sizes of some axes; an absent axis counts one."""
        result = torch.ones_like(self.num_micro_batches)
        for axis in axes:
            result = result * self.sizes.get(axis, torch.ones_like(result))
        return result


def all_meshes(world_size: int, axes: Sequence[str]) -> Candidates:
    """Return all meshes of a number of ranks.

    Args:
        world_size: number of ranks.
        axes: axes, the outermost first.
    """
    table = torch.tensor(list(factorisations(world_size, len(axes))), dtype=torch.int64).view(-1, len(axes))
    sizes = {axis: table[:, column] for column, axis in enumerate(axes)}
    return Candidates(sizes, torch.ones(len(table), dtype=torch.int64), may_be_one=True)


def with_same_axes(meshes: Candidates, index: Tensor) -> Iterator[Candidates]:
    """Yield meshes in groups that have the same axes larger than one; `index` selects the meshes."""
    present = torch.stack([sizes[index] > 1 for sizes in meshes.sizes.values()], dim=1)
    for row in torch.unique(present, dim=0):
        group = meshes.select(index[(present == row).all(1)])
        kept = {axis: group.sizes[axis] for axis, has in zip(meshes.sizes, row.tolist(), strict=True) if has}
        yield Candidates(kept, group.num_micro_batches)


def num_choices(meshes: Candidates, rows: Tensor) -> Tensor:
    """Return, ``(N,)``, how many times `with_micro_batches` repeats each mesh."""
    stages = meshes.product([STAGE_AXIS])
    return torch.where(stages > 1, 1 + (rows // stages).clamp_min(1).double().log2().long(), 1)


def with_micro_batches(meshes: Candidates, rows: Tensor) -> Candidates:
    """Repeat each mesh with stages for every number of micro-batches to try: 1, 2, 4, ... times the stages.

    Args:
        meshes: meshes; those without stages have one micro-batch.
        rows: ``(N,)``, number of sequences of a rank, at least the number of stages.
    """
    stages = meshes.product([STAGE_AXIS])
    index, numbers, times = [torch.arange(len(meshes))], [stages], 2
    while bool((fits := (stages > 1) & (stages * times <= rows)).any()):
        index.append(fits.nonzero()[:, 0])
        numbers.append((stages * times)[fits])
        times *= 2
    return replace(meshes.select(torch.cat(index)), num_micro_batches=torch.cat(numbers))
