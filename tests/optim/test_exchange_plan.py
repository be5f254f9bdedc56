"""Who orthogonalises what: every matrix once, the work in equal parts, equal parts sent once."""

import math
from collections import Counter

import pytest

from maxmoe.optim.exchange_plan import Part, Stack, plan_buckets


def sharded(shape: tuple[int, int], num: int, axes: dict[str, int]) -> Stack:
    """Axes in the order of the mesh: `expert` shards the stack, `rows` and `columns` the matrices, others nothing."""
    parts = [Part(((0, num),), (0, shape[0]), (0, shape[1]))]
    for axis, size in axes.items():
        parts = [cut(part, axis, size, place) for part in parts for place in range(size)]
    return Stack(shape, tuple(parts))


def cut(part: Part, axis: str, size: int, place: int) -> Part:
    def share(bounds: tuple[int, int]) -> tuple[int, int]:
        first, last = bounds
        step = -(-(last - first) // size)
        return min(first + place * step, last), min(first + (place + 1) * step, last)

    if axis == "expert":
        return part._replace(stacked=(share(part.stacked[0]),))
    return part._replace(**{axis: share(getattr(part, axis))}) if axis in ("rows", "columns") else part


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
    buckets = plan_buckets(stacks, bucket_size)
    assert (len(buckets) == 1) == (bucket_size == 10**9)
    gathered: Counter[tuple[int, int, int, int]] = Counter()
    kept: Counter[tuple[int, int, int]] = Counter()
    for job in (job for bucket in buckets for job in bucket):
        stack = stacks[job.stack]
        first = stack.parts[job.owner].stacked[0][0]
        for matrix in range(first + job.matrices[0], first + job.matrices[1]):
            for sender in job.senders:
                assert stack.parts[sender].stacked == stack.parts[job.owner].stacked
                for row in range(*stack.parts[sender].rows):
                    gathered.update((job.stack, matrix, row, column) for column in range(*stack.parts[sender].columns))
            kept.update((job.stack, matrix, holder) for holder in job.holders)
    assert set(gathered.values()) == {1}
    assert len(gathered) == sum(num * math.prod(stack.shape) for num, stack in zip((4, 1, 7), stacks, strict=True))
    for number, stack in enumerate(stacks):
        for rank, part in enumerate(stack.parts):
            has_part = part.shape[0] * part.shape[1] > 0
            held = {matrix for s, matrix, holder in kept if s == number and holder == rank}
            assert held == (set(range(*part.stacked[0])) if has_part else set())
    assert set(kept.values()) == {1}


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_work_is_balanced(axes: dict[str, int]) -> None:
    """No rank has more work than the mean and one matrix."""
    stacks = [sharded((48, 64), 24, axes), sharded((16, 16), 24, axes), *[sharded((32, 8), 1, axes)] * 5]
    loads: Counter[int] = Counter()
    for bucket in plan_buckets(stacks, 5000):
        for job in bucket:
            loads[job.owner] += (job.matrices[1] - job.matrices[0]) * stacks[job.stack].cost
    num_ranks = len(stacks[0].parts)
    assert max(loads.values()) <= sum(loads.values()) / num_ranks + max(stack.cost for stack in stacks)
