"""Orthogonalising matrices whose parts lie on several ranks: each is gathered, computed and scattered once."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from maxmoe.optim.exchange_plan import Job, Stack, plan_buckets
from maxmoe.optim.matrix import Matrix
from maxmoe.optim.shards import is_whole, parts_of

BUCKET_SIZE = 2**24  # elements of gathered matrices that a rank holds at a time

Orthogonalize = Callable[[Tensor, "Sharded"], Tensor]


class Sharded(NamedTuple):
    """A parameter of whose matrices this rank has parts.

    Args:
        parameter: the DTensor.
        matrix: which of its dims are those of matrices.
        dtype: of Newton-Schulz, in which the parts travel.
    """

    parameter: DTensor
    matrix: Matrix
    dtype: torch.dtype


class _Message(NamedTuple):
    """A collective in flight, and what arrives."""

    work: dist.Work
    buffer: Tensor


# Parts of matrices that go to, or come from, other ranks, these in the order of the group.
_Parts = list[tuple[int, Job]]


class _Bucket(NamedTuple):
    """What this rank sends and receives.

    Args:
        own: the jobs of this rank.
        to_owners: the parts that this rank sends.
        from_senders: those of its own jobs that it receives.
        to_holders: the parts of the results of its own jobs that it sends back.
        from_owners: those that it receives back.
    """

    own: list[Job]
    to_owners: _Parts
    from_senders: _Parts
    to_holders: _Parts
    from_owners: _Parts


class Exchange:
    """The collectives of all matrices on one mesh: an all-to-all to the owners and another one back per bucket.

    While the matrices of a bucket are computed, the parts of the next one are on their way, and the results of the one
    before. All parameters take part in every step, also those without a gradient on this rank: what a rank sends never
    depends on what happened there.

    Args:
        items: the parameters, on one mesh, with one dtype.
    """

    def __init__(self, items: Sequence[Sharded]) -> None:
        self.items = tuple(items)
        self._dtype, mesh = items[0].dtype, items[0].parameter.device_mesh
        self._group = _group_of(mesh)
        ranks = mesh.mesh.flatten().tolist()
        self._rank = ranks.index(dist.get_rank())
        # By position on the mesh. The splits of a collective are in the order of the group.
        self._rank_in_group = [dist.get_group_rank(self._group, rank) for rank in ranks]
        self._views: list[tuple[int, slice]] = []
        self._stacks: list[Stack] = []
        for index, item in enumerate(items):
            for stack, rows in parts_of(item.parameter, item.matrix):
                self._stacks.append(stack)
                self._views.append((index, rows[self._rank]))
        self._buckets = [self._bucket(jobs) for jobs in plan_buckets(self._stacks, BUCKET_SIZE)]

    @property
    def num_collectives(self) -> int:
        """Of a step."""
        return 2 * len(self._buckets)

    def start(self, updates: Sequence[Tensor]) -> None:
        """Begin to gather the first bucket.

        Args:
            updates: this rank's parts, in the order of `items`; they are overwritten.
        """
        self._updates = [update.contiguous() for update in updates]
        self._parts = [self._part(*view) for view in self._views]
        self._gathered = self._gather(self._buckets[0])

    def finish(self, orthogonalize: Orthogonalize) -> list[Tensor]:
        """Compute this rank's matrices, bucket by bucket, and collect those of others.

        Args:
            orthogonalize: takes ``(n, out, in)`` and the parameter that they are of.

        Returns:
            This rank's parts of the results, in the order of `items`.
        """
        before: tuple[_Bucket, _Message] | None = None
        for number, bucket in enumerate(self._buckets):
            gathered = self._gathered
            gathered.work.wait()
            if number + 1 < len(self._buckets):
                self._gathered = self._gather(self._buckets[number + 1])
            results = {
                job: orthogonalize(matrices, self.items[self._views[job.stack][0]])
                for job, matrices in self._assemble(bucket, gathered.buffer).items()
            }
            scattered = self._scatter(bucket, results)
            if before is not None:
                self._store(*before)
            before = bucket, scattered
        if before is not None:
            self._store(*before)
        updates = self._updates
        del self._updates, self._parts, self._gathered
        return updates

    def _bucket(self, jobs: Sequence[Job]) -> _Bucket:
        def in_order(parts: Iterable[tuple[int, Job]]) -> _Parts:
            return sorted(parts, key=lambda part: self._rank_in_group[part[0]])

        own = [job for job in jobs if job.owner == self._rank]
        return _Bucket(
            own,
            in_order((job.owner, job) for job in jobs if self._rank in job.senders),
            in_order((sender, job) for job in own for sender in job.senders),
            in_order((holder, job) for job in own for holder in job.holders),
            in_order((job.owner, job) for job in jobs if self._rank in job.holders),
        )

    def _part(self, index: int, rows: slice) -> Tensor:
        """View this rank's part of a stack as ``(n, rows, columns)``."""
        matrix = self.items[index].matrix._replace(fused_gate=None)
        view = matrix.views(self._updates[index])[0][..., rows, :]
        return view.unsqueeze(0) if view.dim() == 2 else view.flatten(0, -3)

    def _gather(self, bucket: _Bucket) -> _Message:
        sent = [(owner, self._held(job)) for owner, job in bucket.to_owners]
        return self._exchange(sent, [(sender, self._numel(job, sender)) for sender, job in bucket.from_senders])

    def _assemble(self, bucket: _Bucket, buffer: Tensor) -> dict[Job, Tensor]:
        """Put the parts of this rank's matrices together."""
        whole = {job: buffer.new_empty(job.num_matrices, *self._stacks[job.stack].shape) for job in bucket.own}
        _unpack(buffer, [self._place(job, whole[job], sender) for sender, job in bucket.from_senders])
        return whole

    def _scatter(self, bucket: _Bucket, results: Mapping[Job, Tensor]) -> _Message:
        sent = [(holder, self._place(job, results[job], holder)) for holder, job in bucket.to_holders]
        return self._exchange(sent, [(owner, self._numel(job, self._rank)) for owner, job in bucket.from_owners])

    def _store(self, bucket: _Bucket, message: _Message) -> None:
        message.work.wait()
        _unpack(message.buffer, [self._held(job) for _, job in bucket.from_owners])

    def _exchange(self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, int]]) -> _Message:
        """Send tensors to ranks, and receive numbers of elements from them."""
        counts_sent, counts_received = ([0] * len(self._rank_in_group) for _ in range(2))
        for peer, tensor in sent:
            counts_sent[self._rank_in_group[peer]] += tensor.numel()
        for peer, count in received:
            counts_received[self._rank_in_group[peer]] += count
        buffer = torch.empty(sum(counts_sent), dtype=self._dtype, device=self._updates[0].device)
        start = 0
        for _, tensor in sent:
            buffer[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
            start += tensor.numel()
        result = buffer.new_empty(sum(counts_received))
        work = dist.all_to_all_single(result, buffer, counts_received, counts_sent, group=self._group, async_op=True)
        return _Message(work, result)

    def _held(self, job: Job) -> Tensor:
        """View this rank's part of the matrices of a job."""
        return self._parts[job.stack][slice(*job.matrices)]

    def _numel(self, job: Job, holder: int) -> int:
        """Elements of the part of a holder."""
        return job.num_matrices * math.prod(self._stacks[job.stack].parts[holder].shape)

    def _place(self, job: Job, matrices: Tensor, holder: int) -> Tensor:
        """View the part of a holder in whole matrices."""
        part = self._stacks[job.stack].parts[holder]
        return matrices[:, slice(*part.rows), slice(*part.columns)]


def _unpack(buffer: Tensor, places: Sequence[Tensor]) -> None:
    """Copy what lies one after the other to where it belongs."""
    start = 0
    for place in places:
        place.copy_(buffer[start : start + place.numel()].view(place.shape))
        start += place.numel()


def exchanges_of(items: Iterable[Sharded]) -> list[Exchange]:
    """Group parameters by mesh and dtype, in the order of their first ones; those with whole matrices need none."""
    groups: dict[tuple[DeviceMesh, torch.dtype], list[Sharded]] = {}
    for item in items:
        if not is_whole(item.parameter):
            groups.setdefault((item.parameter.device_mesh, item.dtype), []).append(item)
    return [Exchange(group) for group in groups.values()]


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Find or make the process group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    if world is not None and mesh.size() == world.size():
        return world
    return _new_group(world, tuple(sorted(mesh.mesh.flatten().tolist())))


@cache
def _new_group(_world: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    # Only the ranks of the mesh are here, not the whole world.
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group
