"""Muon on a mesh: any placement on real ranks against one process, the collectives of every preset, equal work."""

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from maxmoe.optim import Matrix, Muon, parameter_groups
from maxmoe.optim import distributed_newton_schulz as collective
from maxmoe.optim.distributed_newton_schulz import DistributedNewtonSchulz, ShardedParameter, distributed_newton_schulz
from maxmoe.optim.owner_assignment import assign_owners, matrix_stacks
from maxmoe.parallel import parallelize, parameter_shardings
from maxmoe.sharding import LogicalRules, Mesh
from support.counted_collectives import CountedCollectives
from support.parallel_decoder import decoder, layouts
from support.parts import assert_same
from support.run_ranks import run_ranks
from support.slow_cases import by_default


def muon(model: nn.Module) -> Muon:
    return Muon(parameter_groups(model), lr=0.02, ns_dtype=torch.float64)


@torch.no_grad()
def step(model: nn.Module, optimizer: Muon) -> None:
    """Take a step with gradients that follow from the parameters, entry by entry, instead of a forward and backward."""
    for parameter in model.parameters():
        parameter.grad = (3 * parameter.detach()).cos()
    optimizer.step()


@pytest.mark.parametrize("world_size", by_default([2, 4], [2]))
def test_matrices_that_an_axis_shards_are_exchanged_and_no_others(world_size: int) -> None:

    @patch.object(collective, "BUCKET_SIZE", 200)
    def check() -> dict[str, tuple[int, int]]:
        found = {}
        for layout in layouts(world_size):
            mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
            model = parallelize(decoder(), mesh, rules)
            optimizer = muon(model)
            with CountedCollectives(mesh) as counted:
                step(model, optimizer)
            shardings = parameter_shardings(decoder(), mesh, rules)
            assert {kind for kind, _ in counted.counts} <= {"all-to-all"}
            times = sum(count for count, _ in counted.counts.values())
            names = {parameter: name for name, parameter in model.named_parameters()}
            distributed = optimizer._distributed or []
            exchanged = {names[sharded.parameter] for each in distributed for sharded in each.parameters}
            is_matrix = {choice.name for choice in parameter_groups(model).choices if choice.matrix is not None}
            assert exchanged == {name for name in is_matrix if any(shardings[name].sharding.spec[-2:])}, layout
            found[str(layout)] = times, sum(2 * len(each._buckets) for each in distributed)
        return found

    (found, *others) = run_ranks(check, world_size)
    assert all(other == found for other in others)
    assert all(times == planned for times, planned in found.values()), found
    assert max(times for times, _ in found.values()) > 2


# Shapes, the group of each and the placements on a mesh of 2 x 3 ranks: dims that do not divide, ranks without a part,
# fused gates that are sharded, strided shards, whole matrices of which a rank has none.
CASES: list[tuple[tuple[int, ...], dict[str, Any], list[Any]]] = [
    ((7, 5), {}, [Shard(0), Shard(1)]),
    ((2, 9), {}, [Replicate(), Shard(0)]),
    ((2, 1), {}, [Shard(0), Shard(0)]),
    ((5, 4, 7), {"input_dim": -2}, [Shard(0), Shard(2)]),
    ((5, 4, 7), {"input_dim": -1}, [Shard(1), Shard(2)]),
    ((1, 4, 7), {"input_dim": -1}, [Shard(0), Shard(0)]),
    ((3, 4, 10), {"input_dim": -2, "fused_gate": "concatenated"}, [Shard(1), Shard(2)]),
    ((3, 4, 10), {"input_dim": -2, "fused_gate": "interleaved"}, [Shard(0), Shard(2)]),
    ((2, 3, 10, 3), {"input_dim": -1, "fused_gate": "interleaved"}, [Shard(2), Shard(2)]),
    ((2, 3, 4, 5), {"input_dim": -1}, [Shard(1), Shard(3)]),
]


def test_any_placement() -> None:
    """Beside a frozen parameter and one without a gradient."""

    def whole(shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    @patch.object(collective, "BUCKET_SIZE", 20)
    def check() -> None:
        mesh = Mesh({"fsdp": 2, "expert": 3}).device_mesh
        plain = [nn.Parameter(whole(shape, seed)) for seed, (shape, _, _) in enumerate(CASES)]
        sharded = [
            nn.Parameter(distribute_tensor(parameter.detach().clone(), mesh, placements))
            for parameter, (_, _, placements) in zip(plain, CASES, strict=True)
        ]
        groups = [{"params": [each], **group} for each, (_, group, _) in zip(plain, CASES, strict=True)]
        one = Muon(groups, lr=0.1, ns_dtype=torch.float64)
        unused, frozen = (
            nn.Parameter(distribute_tensor(whole((6, 6), 50), mesh, [Shard(0), Shard(1)]), requires_grad=trained)
            for trained in (True, False)
        )
        groups = [{"params": [each], **group} for each, (_, group, _) in zip(sharded, CASES, strict=True)]
        many = Muon([*groups, {"params": [unused, frozen]}], lr=0.1, ns_dtype=torch.float64)
        for step in range(2):
            for number, (parameter, part) in enumerate(zip(plain, sharded, strict=True)):
                parameter.grad = whole(parameter.shape, 100 * step + number)
                part.grad = distribute_tensor(parameter.grad.clone(), mesh, part.placements)  # type: ignore[attr-defined]
                if number == 4 and step == 1:  # in another sharding than the parameter
                    part.grad = part.grad.redistribute(placements=[Replicate(), Shard(0)])
            one.step()
            many.step()
        for (shape, group, _), parameter, part in zip(CASES, plain, sharded, strict=True):
            assert_same(part.full_tensor(), parameter.detach(), f"{shape} {group}", tolerance=1e-10)  # type: ignore[attr-defined]
        assert unused.full_tensor().equal(whole((6, 6), 50)) and frozen.full_tensor().equal(whole((6, 6), 50))  # type: ignore[attr-defined]
        empty = distribute_tensor(torch.zeros(0, 4), mesh, [Shard(1), Shard(1)])
        assert not distributed_newton_schulz([ShardedParameter(empty, Matrix(), torch.float64)])
        assert frozen not in many.state and isinstance(many.state[unused]["momentum_buffer"], DTensor)

    run_ranks(check, 6)


def test_buckets_overlap() -> None:
    """While a bucket is computed, the shards of the next bucket and the results of the previous one are sent."""
    send = dist.all_to_all_single

    def check() -> None:
        events: list[str] = []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            number = sum("send" in event for event in events)
            events.append(f"send {number}")
            work = send(*args, **kwargs)
            return SimpleNamespace(wait=lambda: events.append(f"receive {number}") or work.wait())

        def computed(matrices: Tensor, sharded: ShardedParameter) -> Tensor:
            events.append(f"compute {numbers[sharded.parameter]}")
            return matrices + 1

        mesh = Mesh({"fsdp": 2}).device_mesh
        # Stacks of two matrices: each rank owns one of a bucket.
        parameters = [distribute_tensor(torch.full((2, 8, 8), float(i)), mesh, [Shard(1)]) for i in range(4)]
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        with patch.object(collective, "BUCKET_SIZE", 64), patch.object(dist, "all_to_all_single", recorded):
            buckets = DistributedNewtonSchulz([ShardedParameter(each, Matrix(), torch.float32) for each in parameters])
            buckets.start(lambda sharded: sharded.parameter.to_local().clone())
            assert [result.mean().item() for _, result in buckets.finish(computed)] == [1, 2, 3, 4]
        assert " ".join(events) == (
            "send 0 receive 0 send 1 compute 0 send 2 receive 1 send 3 compute 1 send 4 receive 2 receive 3 "
            "send 5 compute 2 send 6 receive 4 receive 5 compute 3 send 7 receive 6 receive 7"
        )

    run_ranks(check, 2)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((4,), [Shard(1)]),
        ((2, 3), [Shard(1), Shard(2)]),
        ((2, 2, 2), [Replicate(), Shard(1), Shard(0)]),
        ((3, 2, 2), [Shard(0), Replicate(), Shard(2)]),
    ],
    ids=str,
)
def test_work_is_balanced(mesh: tuple[int, ...], placements: list[Shard | Replicate]) -> None:
    """No rank has more work than the mean plus one matrix."""
    shapes = [(24, 48, 64), (24, 16, 16), *[(1, 32, 8)] * 5]
    stacks = [stack for shape in shapes for stack in matrix_stacks(shape, mesh, placements, Matrix())]
    loads, owned = Counter[int](), Counter[int]()
    for bucket in assign_owners(stacks, 5000):
        for assignment in bucket:
            loads[assignment.owner] += assignment.num_matrices * stacks[assignment.stack].cost
            owned[assignment.stack] += assignment.num_matrices
    assert list(owned.values()) == [24, 24, 1, 1, 1, 1, 1]
    num_ranks = len(stacks[0].shards)
    assert max(loads.values()) <= sum(loads.values()) / num_ranks + max(stack.cost for stack in stacks)


def test_a_partial_sum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a parameter must not be a partial sum, got the placement P"):
        matrix_stacks((4, 6), (2,), (Partial(),), Matrix())
