"""Distributed Newton-Schulz: sharded matrices are gathered on their owners, orthogonalised and scattered again."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from maxmoe.optim.newton_schulz import Matrix
from maxmoe.optim.owner_assignment import MatrixStack, OwnerAssignment, assign_owners, matrix_stacks
from maxmoe.ranks.named_collectives import all_to_all

BUCKET_SIZE = 2**24  # elements of gathered matrices that a rank holds at a time

Update: TypeAlias = Callable[["ShardedParameter"], Tensor]
Orthogonalize: TypeAlias = Callable[[Tensor, "ShardedParameter"], Tensor]
_InFlight: TypeAlias = tuple[dist.Work, Tensor]  # an all-to-all and the buffer that it fills


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A DTensor whose matrices are orthogonalised, and the dtype of Newton-Schulz and of the collectives."""

    parameter: DTensor
    matrix: Matrix
    dtype: torch.dtype

    @cached_property
    def stacks(self) -> list[MatrixStack]:
        """Stacks of matrices in the parameter; empty if every rank holds whole matrices."""
        parameter = self.parameter
        return matrix_stacks(parameter.shape, parameter.device_mesh.shape, parameter.placements, self.matrix)


class _Message(NamedTuple):
    """A holder's shard of the assigned matrices, sent to a peer or received from it; ranks by position on the mesh."""

    peer: int
    assignment: OwnerAssignment
    holder: int


class _Bucket(NamedTuple):
    """Matrices that are gathered together, and what this rank sends and receives of them, in the order of the group."""

    parameters: list[int]  # indices of the parameters that the matrices belong to
    ending: list[int]  # parameters without matrices in later buckets
    owned: list[OwnerAssignment]
    gather_sends: list[_Message]
    gather_receives: list[_Message]
    scatter_sends: list[_Message]
    scatter_receives: list[_Message]


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
        ranks = mesh.mesh.flatten().tolist()
        self._group = mesh.get_group() if mesh.ndim == 1 else _group_of(dist.group.WORLD, tuple(sorted(ranks)))
        # Assignments name ranks by position on the mesh; the splits of a collective are in the order of the group.
        self._rank = ranks.index(dist.get_rank())
        self._rank_in_group = [dist.get_group_rank(self._group, rank) for rank in ranks]
        self._stacks = [stack for sharded in parameters for stack in sharded.stacks]
        self._parameter_of = [index for index, sharded in enumerate(parameters) for _ in sharded.stacks]
        buckets = assign_owners(self._stacks, BUCKET_SIZE)
        last = {self._parameter_of[each.stack]: number for number, bucket in enumerate(buckets) for each in bucket}
        ending: list[list[int]] = [[] for _ in buckets]
        for index, number in last.items():
            ending[number].append(index)
        self._buckets = [self._bucket(*pair) for pair in zip(buckets, ending, strict=True)]

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
        previous: tuple[_Bucket, _InFlight] | None = None
        for number, bucket in enumerate(self._buckets):
            work, buffer = self._gathered
            work.wait()
            if number + 1 < len(self._buckets):
                self._gathered = self._gather(self._buckets[number + 1])
            results = {
                assignment: orthogonalize(matrices, self.parameters[self._parameter_of[assignment.stack]])
                for assignment, matrices in self._assemble(bucket, buffer).items()
            }
            view = partial(self._shard_view, results)
            scattered = self._all_to_all(bucket.scatter_sends, bucket.scatter_receives, view)
            if previous is not None:
                yield from self._store(*previous)
            previous = bucket, scattered
        if previous is not None:
            yield from self._store(*previous)
        del self._update, self._gathered

    def _bucket(self, assignments: Sequence[OwnerAssignment], ending: list[int]) -> _Bucket:
        """List what this rank sends and receives for the assignments of a bucket."""

        def in_group_order(messages: Iterable[_Message]) -> list[_Message]:
            return sorted(messages, key=lambda message: self._rank_in_group[message.peer])

        me = self._rank
        owned = [each for each in assignments if each.owner == me]
        return _Bucket(
            [*dict.fromkeys(self._parameter_of[each.stack] for each in assignments)],
            ending,
            owned,
            in_group_order(_Message(each.owner, each, me) for each in assignments if me in each.senders),
            in_group_order(_Message(rank, each, rank) for each in owned for rank in each.senders),
            in_group_order(_Message(rank, each, rank) for each in owned for rank in each.holders),
            in_group_order(_Message(each.owner, each, me) for each in assignments if me in each.holders),
        )

    def _gather(self, bucket: _Bucket) -> _InFlight:
        """Start to send the shards of the updates to the owners."""
        for index in bucket.parameters:
            if index not in self._updates:
                self._updates[index] = self._update(self.parameters[index]).contiguous()
        return self._all_to_all(bucket.gather_sends, bucket.gather_receives, self._local_view)

    def _assemble(self, bucket: _Bucket, buffer: Tensor) -> dict[OwnerAssignment, Tensor]:
        """Copy the gathered shards into whole matrices."""
        whole = {each: buffer.new_empty(each.num_matrices, *self._stacks[each.stack].shape) for each in bucket.owned}
        for part, view in _parts(buffer, [self._shard_view(whole, message) for message in bucket.gather_receives]):
            view.copy_(part)
        return whole

    def _store(self, bucket: _Bucket, scattered: _InFlight) -> Iterator[tuple[ShardedParameter, Tensor]]:
        """Overwrite the updates with the received results, and yield the parameters that are complete."""
        work, buffer = scattered
        work.wait()
        for part, view in _parts(buffer, [*map(self._local_view, bucket.scatter_receives)]):
            view.copy_(part)
        for index in bucket.ending:
            yield self.parameters[index], self._updates.pop(index)

    def _all_to_all(
        self, sends: Sequence[_Message], receives: Sequence[_Message], view: Callable[[_Message], Tensor]
    ) -> _InFlight:
        """Start to send views to their peers, and to receive shards."""
        send_counts, receive_counts = ([0] * len(self._rank_in_group) for _ in range(2))
        for messages, counts in ((sends, send_counts), (receives, receive_counts)):
            for peer, assignment, holder in messages:
                shape = self._stacks[assignment.stack].shards[holder].shape
                counts[self._rank_in_group[peer]] += assignment.num_matrices * math.prod(shape)
        packed = torch.empty(sum(send_counts), dtype=self._dtype, device=self._device)
        for part, shard in _parts(packed, [*map(view, sends)]):
            part.copy_(shard)
        received = packed.new_empty(sum(receive_counts))
        work = all_to_all(received, packed, receive_counts, send_counts, "matrices of Muon", group=self._group)
        return work, received

    def _local_view(self, message: _Message) -> Tensor:
        """View this rank's shard of the assigned matrices as ``(n, rows, columns)``, in its update."""
        assignment = message.assignment
        index = self._parameter_of[assignment.stack]
        update = self._updates[index]
        matrices = update if self.parameters[index].matrix.input_dim == -1 else update.mT
        rows = matrices[..., self._stacks[assignment.stack].shards[self._rank].local_rows, :]
        return (rows.unsqueeze(0) if rows.dim() == 2 else rows.flatten(0, -3))[slice(*assignment.matrices)]

    def _shard_view(self, whole: Mapping[OwnerAssignment, Tensor], message: _Message) -> Tensor:
        """View a holder's shard of the assigned matrices as ``(n, rows, columns)``, in whole matrices."""
        shard = self._stacks[message.assignment.stack].shards[message.holder]
        return whole[message.assignment][:, slice(*shard.rows), slice(*shard.columns)]


def _parts(buffer: Tensor, views: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair each view with its part of a flat buffer, in the shape of the view."""
    for part, view in zip(torch.split(buffer, [view.numel() for view in views]), views, strict=True):
        yield part.view(view.shape), view


def distributed_newton_schulz(parameters: Iterable[ShardedParameter]) -> list[DistributedNewtonSchulz]:
    """Group the parameters with sharded matrices by mesh and dtype."""
    groups: dict[tuple[DeviceMesh, torch.dtype], list[ShardedParameter]] = {}
    for sharded in parameters:
        if sharded.parameter.numel() and sharded.stacks:
            groups.setdefault((sharded.parameter.device_mesh, sharded.dtype), []).append(sharded)
    return [DistributedNewtonSchulz(group) for group in groups.values()]


@cache
def _group_of(world: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the process group of some ranks, made once for each default group. Other ranks do not call this."""
    if world is not None and len(ranks) == world.size():
        return world
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group
