"""Collectives of `maxmoe.optim.Muon` per optimizer step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod

import torch

from maxmoe.optim.distributed_newton_schulz import BUCKET_SIZE
from maxmoe.optim.newton_schulz import Matrix
from maxmoe.optim.owner_assignment import MatrixStack, OwnerAssignment, assign_owners, matrix_stacks
from maxmoe.optim.parameter_groups import Choice
from maxmoe.parallel.plan.plan import ParameterPlan
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.planned_collective import PlannedCollective

PURPOSES = ("Muon, gather of matrices", "Muon, scatter of results")


def muon_communication(
    mesh: Mesh, parameters: Mapping[str, ParameterPlan], choices: Iterable[Choice], ns_dtype: torch.dtype
) -> Iterator[PlannedCollective]:
    """Yield the gather and the scatter of every bucket of sharded matrices, with the mean of the bytes over ranks."""

    @cache  # because layers repeat
    def stacks_of(shape: tuple[int, ...], sharding: NamedSharding, matrix: Matrix) -> list[MatrixStack]:
        mesh_shape = [sharding.mesh.size(axis) for axis in sharding.mesh.axes] or [1]
        return matrix_stacks(shape, mesh_shape, sharding.placements, matrix)

    groups: dict[Matrix, list[Choice]] = {}  # in the order of the parameter groups
    for choice in choices:
        if choice.matrix is not None:
            groups.setdefault(choice.matrix, []).append(choice)
    stacks = [
        stack
        for matrix, group in groups.items()
        for choice in group
        for stack in stacks_of(choice.shape, parameters[choice.name].stored, matrix)
    ]
    for assignments in assign_owners(stacks, BUCKET_SIZE):
        for purpose, num_elements in zip(PURPOSES, _elements(stacks, assignments), strict=True):
            num_bytes = num_elements * ns_dtype.itemsize // mesh.num_ranks
            yield PlannedCollective(purpose, "all-to-all", mesh.axes, num_bytes)


def _elements(stacks: Sequence[MatrixStack], assignments: Sequence[OwnerAssignment]) -> tuple[int, int]:
    """Count the elements that ranks send to each other in the gather and in the scatter."""

    @cache
    def held(stack: int, holders: tuple[int, ...]) -> int:
        return sum(prod(stacks[stack].shards[rank].shape) for rank in holders)

    gathered = scattered = 0
    for each in assignments:
        own = prod(stacks[each.stack].shards[each.owner].shape)
        gathered += each.num_matrices * (prod(stacks[each.stack].shape) - own)
        scattered += each.num_matrices * (held(each.stack, each.holders) - own)
    return gathered, scattered
