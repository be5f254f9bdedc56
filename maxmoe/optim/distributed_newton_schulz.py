"""Distributed Newton-Schulz: sharded matrices are gathered on their owners, orthogonalised and scattered again."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from maxmoe.optim.newton_schulz import Matrix
from maxmoe.optim.owner_assignment import MatrixStack, OwnerAssignment, assign_owners, matrix_stacks
from maxmoe.ranks.named_collectives import all_to_all

BUCKET_SIZE = 2**24  # elements of gathered matrices that a rank holds at a time

Update = Callable[["ShardedParameter"], Tensor]
Orthogonalize = Callable[[Tensor, "ShardedParameter"], Tensor]


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A DTensor whose matrices are orthogonalised.

    Args:
        parameter: the DTensor.
        matrix: the matrices in its last two dims.
        dtype: dtype of Newton-Schulz and of the collectives.
    """

    parameter: DTensor
    matrix: Matrix
    dtype: torch.dtype

    @cached_property
    def stacks(self) -> list[MatrixStack]:
        """Stacks of matrices in the parameter; empty if every rank holds whole matrices."""
        parameter = self.parameter
        return matrix_stacks(parameter.shape, parameter.device_mesh.shape, parameter.placements, self.matrix)


class _Transfer(NamedTuple):
    """Shard of the assigned matrices that this rank sends to a peer, or receives from it."""

    peer: int  # position on the mesh
    assignment: OwnerAssignment


class _Bucket(NamedTuple):
    """The sends and receives of this rank for matrices that are gathered together.

    Args:
        starting: indices of the parameters whose first matrices are in this bucket.
        ending: indices of the parameters whose last matrices are in this bucket.
        owned: assignments of which this rank is the owner.
        gather_sends: shards of the updates that this rank sends to the owners.
        gather_receives: shards of the updates of the owned matrices, from the ranks that send them.
        scatter_sends: shards of the results of the owned matrices, sent to the ranks that hold the parameter shards.
        scatter_receives: results for the parameter shards of this rank, from the owners.
    """

    starting: list[int]
    ending: list[int]
    owned: list[OwnerAssignment]
    gather_sends: list[_Transfer]
    gather_receives: list[_Transfer]
    scatter_sends: list[_Transfer]
    scatter_receives: list[_Transfer]


class _AllToAll(NamedTuple):
    """An all-to-all in flight and the buffer that it fills."""

    work: dist.Work
    buffer: Tensor


class DistributedNewtonSchulz:
    """Orthogonalises the sharded matrices of parameters on one mesh. Every matrix has one owner.

    A step runs for each bucket of matrices:

    1. An all-to-all gathers the shards of the update of every matrix on its owner.
    2. The owner orthogonalises the matrix.
    3. An all-to-all scatters the result to all ranks that hold a shard of the matrix.

    The computation of a bucket overlaps with the gather of the next one and the scatter of the previous one; no other
    bucket is in memory. Parameters without a gradient take part as well, so that all ranks call the same collectives.
    All parameters have the same mesh and the same dtype of Newton-Schulz.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self.parameters = tuple(parameters)
        self._dtype, self._device = parameters[0].dtype, parameters[0].parameter.device
        mesh = parameters[0].parameter.device_mesh
        self._group = _process_group(mesh)
        ranks = mesh.mesh.flatten().tolist()
        # Assignments name ranks by position on the mesh; the splits of a collective are in the order of the group.
        self._rank = ranks.index(dist.get_rank())
        self._rank_in_group = [dist.get_group_rank(self._group, rank) for rank in ranks]
        self._stacks = [stack for sharded in parameters for stack in sharded.stacks]
        self._parameter_of = [index for index, sharded in enumerate(parameters) for _ in sharded.stacks]
        buckets = assign_owners(self._stacks, BUCKET_SIZE)
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for number, assignments in enumerate(buckets):
            for assignment in assignments:
                index = self._parameter_of[assignment.stack]
                first.setdefault(index, number)
                last[index] = number
        self._buckets = [
            self._bucket(
                [index for index, start in first.items() if start == number],
                [index for index, end in last.items() if end == number],
                assignments,
            )
            for number, assignments in enumerate(buckets)
        ]

    def start(self, update: Update) -> None:
        """Start to gather the first bucket.

        `update` returns this rank's shard of the update of a parameter, which is overwritten with the result. It is
        called once per parameter, when the first matrices of the parameter are gathered.
        """
        self._update = update
        self._updates: dict[int, Tensor] = {}
        self._gathered = self._gather(self._buckets[0])

    def finish(self, orthogonalize: Orthogonalize) -> Iterator[tuple[ShardedParameter, Tensor]]:
        """Orthogonalise the matrices ``(n, out, in)`` of this rank, and yield its shard of the result per parameter."""
        previous: tuple[_Bucket, _AllToAll] | None = None
        for number, bucket in enumerate(self._buckets):
            gathered = self._gathered
            gathered.work.wait()
            if number + 1 < len(self._buckets):
                self._gathered = self._gather(self._buckets[number + 1])
            results = {
                assignment: orthogonalize(matrices, self.parameters[self._parameter_of[assignment.stack]])
                for assignment, matrices in self._assemble(bucket, gathered.buffer).items()
            }
            scattered = self._scatter(bucket, results)
            if previous is not None:
                yield from self._store(*previous)
            previous = bucket, scattered
        if previous is not None:
            yield from self._store(*previous)
        del self._update, self._gathered

    def _bucket(self, starting: list[int], ending: list[int], assignments: Sequence[OwnerAssignment]) -> _Bucket:
        """List the sends and receives of this rank for the assignments of a bucket."""

        def in_group_order(transfers: Iterable[_Transfer]) -> list[_Transfer]:
            return sorted(transfers, key=lambda transfer: self._rank_in_group[transfer.peer])

        owned = [each for each in assignments if each.owner == self._rank]
        return _Bucket(
            starting,
            ending,
            owned,
            in_group_order(_Transfer(each.owner, each) for each in assignments if self._rank in each.senders),
            in_group_order(_Transfer(sender, each) for each in owned for sender in each.senders),
            in_group_order(_Transfer(holder, each) for each in owned for holder in each.holders),
            in_group_order(_Transfer(each.owner, each) for each in assignments if self._rank in each.holders),
        )

    def _gather(self, bucket: _Bucket) -> _AllToAll:
        """Start to send the shards of the updates to the owners."""
        for index in bucket.starting:
            self._updates[index] = self._update(self.parameters[index]).contiguous()
        sends = [(owner, self._local_view(assignment)) for owner, assignment in bucket.gather_sends]
        return self._all_to_all(sends, [(sender, self._numel(each, sender)) for sender, each in bucket.gather_receives])

    def _assemble(self, bucket: _Bucket, buffer: Tensor) -> dict[OwnerAssignment, Tensor]:
        """Copy the gathered shards into whole matrices."""
        whole = {each: buffer.new_empty(each.num_matrices, *self._stacks[each.stack].shape) for each in bucket.owned}
        _unpack(buffer, [self._shard_view(each, whole[each], sender) for sender, each in bucket.gather_receives])
        return whole

    def _scatter(self, bucket: _Bucket, results: Mapping[OwnerAssignment, Tensor]) -> _AllToAll:
        """Start to send the shards of the results to the ranks that hold the parameter shards."""
        sends = [(holder, self._shard_view(each, results[each], holder)) for holder, each in bucket.scatter_sends]
        return self._all_to_all(
            sends, [(owner, self._numel(each, self._rank)) for owner, each in bucket.scatter_receives]
        )

    def _store(self, bucket: _Bucket, scattered: _AllToAll) -> Iterator[tuple[ShardedParameter, Tensor]]:
        """Overwrite the updates with the received results, and yield the parameters that are complete."""
        scattered.work.wait()
        _unpack(scattered.buffer, [self._local_view(assignment) for _, assignment in bucket.scatter_receives])
        for index in bucket.ending:
            yield self.parameters[index], self._updates.pop(index)

    def _all_to_all(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, int]]) -> _AllToAll:
        """Start to send tensors to peers, and to receive the given number of elements from each peer."""
        send_counts, receive_counts = ([0] * len(self._rank_in_group) for _ in range(2))
        for peer, tensor in sends:
            send_counts[self._rank_in_group[peer]] += tensor.numel()
        for peer, count in receives:
            receive_counts[self._rank_in_group[peer]] += count
        packed = torch.empty(sum(send_counts), dtype=self._dtype, device=self._device)
        start = 0
        for _, tensor in sends:
            packed[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
            start += tensor.numel()
        received = packed.new_empty(sum(receive_counts))
        work = all_to_all(received, packed, receive_counts, send_counts, "matrices of Muon", group=self._group)
        return _AllToAll(work, received)

    def _numel(self, assignment: OwnerAssignment, holder: int) -> int:
        """Return the number of elements in a holder's shard of the assigned matrices."""
        return assignment.num_matrices * math.prod(self._stacks[assignment.stack].shards[holder].shape)

    def _local_view(self, assignment: OwnerAssignment) -> Tensor:
        """View this rank's shard of the assigned matrices as ``(n, rows, columns)``, in its update."""
        index = self._parameter_of[assignment.stack]
        update = self._updates[index]
        matrices = update if self.parameters[index].matrix.input_dim == -1 else update.mT
        rows = matrices[..., self._stacks[assignment.stack].shards[self._rank].local_rows, :]
        return (rows.unsqueeze(0) if rows.dim() == 2 else rows.flatten(0, -3))[slice(*assignment.matrices)]

    def _shard_view(self, assignment: OwnerAssignment, matrices: Tensor, holder: int) -> Tensor:
        """View a holder's shard of the assigned matrices as ``(n, rows, columns)``, in whole matrices."""
        shard = self._stacks[assignment.stack].shards[holder]
        return matrices[:, slice(*shard.rows), slice(*shard.columns)]


def _unpack(buffer: Tensor, views: Iterable[Tensor]) -> None:
    """Copy the elements of a flat buffer into views, one view after the other."""
    start = 0
    for view in views:
        view.copy_(buffer[start : start + view.numel()].view(view.shape))
        start += view.numel()


def distributed_newton_schulz(parameters: Iterable[ShardedParameter]) -> list[DistributedNewtonSchulz]:
    """Group the parameters with sharded matrices by mesh and dtype."""
    groups: dict[tuple[DeviceMesh, torch.dtype], list[ShardedParameter]] = {}
    for sharded in parameters:
        if sharded.parameter.numel() and sharded.stacks:
            groups.setdefault((sharded.parameter.device_mesh, sharded.dtype), []).append(sharded)
    return [DistributedNewtonSchulz(group) for group in groups.values()]


def _process_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Find or make the process group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    if world is not None and mesh.size() == world.size():
        return world
    return _new_group(world, tuple(sorted(mesh.mesh.flatten().tolist())))


@cache
def _new_group(_world: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Make a process group, once per set of ranks and default group."""
    # The ranks outside of the mesh do not call this function.
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group
