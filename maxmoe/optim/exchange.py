"""Orthogonalising matrices whose parts lie on several ranks: each is gathered, computed and scattered once."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

Update = Callable[["Sharded"], Tensor]
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
        begun: the items whose first matrices are in this bucket, by index.
        ended: those whose last matrices are.
        own: the jobs of this rank.
        to_owners: the parts that this rank sends.
        from_senders: those of its own jobs that it receives.
        to_holders: the parts of the results of its own jobs that it sends back.
        from_owners: those that it receives back.
    """

    begun: list[int]
    ended: list[int]
    own: list[Job]
    to_owners: _Parts
    from_senders: _Parts
    to_holders: _Parts
    from_owners: _Parts


class Exchange:
    """The collectives of all matrices on one mesh: an all-to-all to the owners and another one back per bucket.

    While the matrices of a bucket are computed, the parts of the next one are on their way, and the results of the one
    before; no other bucket is in memory. All parameters take part in every step, also those without a gradient on this
    rank: what a rank sends never depends on what happened there.

    Args:
        items: the parameters, on one mesh, with one dtype.
    """

    def __init__(self, items: Sequence[Sharded]) -> None:
        self.items = tuple(items)
        self._dtype, self._device = items[0].dtype, items[0].parameter.device
        mesh = items[0].parameter.device_mesh
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
        buckets = plan_buckets(self._stacks, BUCKET_SIZE)
        numbers: dict[int, list[int]] = {}
        for number, jobs in enumerate(buckets):
            for job in jobs:
                numbers.setdefault(self._views[job.stack][0], []).append(number)
        self._buckets = [
            self._bucket(
                [index for index, within in numbers.items() if within[0] == number],
                [index for index, within in numbers.items() if within[-1] == number],
                jobs,
            )
            for number, jobs in enumerate(buckets)
        ]

    @property
    def num_collectives(self) -> int:
        """Of a step."""
        return 2 * len(self._buckets)

    def start(self, update: Update) -> None:
        """Begin to gather the first bucket.

        Args:
            update: returns this rank's part of what is orthogonalised for a parameter, which is overwritten. It is
                called once for each in a step, when the first bucket that has its matrices is gathered.
        """
        self._update = update
        self._updates: dict[int, Tensor] = {}
        self._gathered = self._gather(self._buckets[0])

    def finish(self, orthogonalize: Orthogonalize) -> Iterator[tuple[Sharded, Tensor]]:
        """Compute this rank's matrices, bucket by bucket, and collect those of others.

        Args:
            orthogonalize: takes ``(n, out, in)`` and the parameter that they are of.

        Yields:
            Each parameter with this rank's part of the result, after the last bucket that has its matrices.
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
                yield from self._store(*before)
            before = bucket, scattered
        if before is not None:
            yield from self._store(*before)
        del self._update, self._gathered

    def _bucket(self, begun: list[int], ended: list[int], jobs: Sequence[Job]) -> _Bucket:
        def in_order(parts: Iterable[tuple[int, Job]]) -> _Parts:
            return sorted(parts, key=lambda part: self._rank_in_group[part[0]])

        own = [job for job in jobs if job.owner == self._rank]
        return _Bucket(
            begun,
            ended,
            own,
            in_order((job.owner, job) for job in jobs if self._rank in job.senders),
            in_order((sender, job) for job in own for sender in job.senders),
            in_order((holder, job) for job in own for holder in job.holders),
            in_order((job.owner, job) for job in jobs if self._rank in job.holders),
        )

    def _gather(self, bucket: _Bucket) -> _Message:
        for index in bucket.begun:
            self._updates[index] = self._update(self.items[index]).contiguous()
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

    def _store(self, bucket: _Bucket, message: _Message) -> Iterator[tuple[Sharded, Tensor]]:
        message.work.wait()
        _unpack(message.buffer, [self._held(job) for _, job in bucket.from_owners])
        for index in bucket.ended:
            yield self.items[index], self._updates.pop(index)

    def _exchange(self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, int]]) -> _Message:
        """Send tensors to ranks, and receive numbers of elements from them."""
        counts_sent, counts_received = ([0] * len(self._rank_in_group) for _ in range(2))
        for peer, tensor in sent:
            counts_sent[self._rank_in_group[peer]] += tensor.numel()
        for peer, count in received:
            counts_received[self._rank_in_group[peer]] += count
        buffer = torch.empty(sum(counts_sent), dtype=self._dtype, device=self._device)
        start = 0
        for _, tensor in sent:
            buffer[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
            start += tensor.numel()
        result = buffer.new_empty(sum(counts_received))
        work = dist.all_to_all_single(result, buffer, counts_received, counts_sent, group=self._group, async_op=True)
        return _Message(work, result)

    def _held(self, job: Job) -> Tensor:
        """View this rank's part of the matrices of a job as ``(n, rows, columns)``."""
        index, rows = self._views[job.stack]
        matrix = self.items[index].matrix._replace(fused_gate=None)
        view = matrix.views(self._updates[index])[0][..., rows, :]
        return (view.unsqueeze(0) if view.dim() == 2 else view.flatten(0, -3))[slice(*job.matrices)]

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
        if item.parameter.numel() and not is_whole(item.parameter):
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
