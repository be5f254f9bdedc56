"""The ranks that orthogonalise matrices: every matrix has one owner, and ranks have equal work."""

import math
from collections import Counter

import pytest
from torch.distributed.tensor import Partial

from maxmoe.optim.newton_schulz import Matrix
from maxmoe.optim.owner_assignment import MatrixShard, MatrixStack, assign_owners, matrix_stacks


def sharded(shape: tuple[int, int], num: int, axes: dict[str, int]) -> MatrixStack:
    """Axes in the order of the mesh: `expert` shards the stack, `rows` and `columns` the matrices, others nothing."""
    shards = [MatrixShard(((0, num),), (0, shape[0]), (0, shape[1]))]
    for axis, size in axes.items():
        shards = [cut(shard, axis, size, place) for shard in shards for place in range(size)]
    return MatrixStack(shape, tuple(shards))


def cut(shard: MatrixShard, axis: str, size: int, place: int) -> MatrixShard:
    def share(bounds: tuple[int, int]) -> tuple[int, int]:
        first, last = bounds
        step = -(-(last - first) // size)
        return min(first + place * step, last), min(first + (place + 1) * step, last)

    if axis == "expert":
        return shard._replace(stacked=(share(shard.stacked[0]),))
    return shard._replace(**{axis: share(getattr(shard, axis))}) if axis in ("rows", "columns") else shard


MESHES: list[dict[str, int]] = [
    {"rows": 4},
    {"rows": 2, "columns": 3},
    {"data": 2, "rows": 2, "expert": 2},
    {"expert": 3, "data": 2, "columns": 2},
]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("bucket_size", [1, 20, 10**9])
def test_every_part_of_every_matrix_reaches_its_owner_once(axes: dict[str, int], bucket_size: int) -> None:
    stacks = [sharded((5, 7), 4, axes), sharded((3, 2), 1, axes), sharded((9, 4), 7, axes)]
    buckets = assign_owners(stacks, bucket_size)
    assert (len(buckets) == 1) == (bucket_size == 10**9)
    gathered: Counter[tuple[int, int, int, int]] = Counter()
    kept: Counter[tuple[int, int, int]] = Counter()
    for assignment in (assignment for bucket in buckets for assignment in bucket):
        stack = stacks[assignment.stack]
        first = stack.shards[assignment.owner].stacked[0][0]
        for matrix in range(first + assignment.matrices[0], first + assignment.matrices[1]):
            for sender in assignment.senders:
                assert stack.shards[sender].stacked == stack.shards[assignment.owner].stacked
                for row in range(*stack.shards[sender].rows):
                    gathered.update(
                        (assignment.stack, matrix, row, column) for column in range(*stack.shards[sender].columns)
                    )
            kept.update((assignment.stack, matrix, holder) for holder in assignment.holders)
    assert set(gathered.values()) == {1}
    assert len(gathered) == sum(num * math.prod(stack.shape) for num, stack in zip((4, 1, 7), stacks, strict=True))
    for number, stack in enumerate(stacks):
        for rank, shard in enumerate(stack.shards):
            has_part = shard.shape[0] * shard.shape[1] > 0
            held = {matrix for s, matrix, holder in kept if s == number and holder == rank}
            assert held == (set(range(*shard.stacked[0])) if has_part else set())
    assert set(kept.values()) == {1}


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_work_is_balanced(axes: dict[str, int]) -> None:
    """No rank has more work than the mean plus one matrix."""
    stacks = [sharded((48, 64), 24, axes), sharded((16, 16), 24, axes), *[sharded((32, 8), 1, axes)] * 5]
    loads, owned = Counter[int](), Counter[int]()
    for bucket in assign_owners(stacks, 5000):
        for assignment in bucket:
            count = assignment.matrices[1] - assignment.matrices[0]
            loads[assignment.owner] += count * stacks[assignment.stack].cost
            owned[assignment.stack] += count
    assert list(owned.values()) == [24, 24, 1, 1, 1, 1, 1]
    num_ranks = len(stacks[0].shards)
    assert max(loads.values()) <= sum(loads.values()) / num_ranks + max(stack.cost for stack in stacks)


def test_a_partial_sum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a parameter must not be a partial sum, got the placement P"):
        matrix_stacks((4, 6), (2,), (Partial(),), Matrix())
