"""Redistribution of tensors: values and gradients on real ranks against one process."""

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from maxmoe.sharding import Mesh, NamedSharding, P, PartitionSpec, redistribute
from maxmoe.sharding.redistribute import Redistribution, redistribute_local, redistribution_steps
from support.parts import assert_same, laid, part_by_definition, whole_tensor
from support.run_ranks import fake_rank, run_cases, run_ranks
from support.sampling import by_default

SIZES = {"data": 2, "fsdp": 2, "expert": 2}


def random_spec(draw: random.Random, axes: tuple[str, ...] = tuple(SIZES)) -> PartitionSpec:
    """Random axes in random order, distributed over the dims."""
    chosen = draw.sample(axes, draw.randrange(len(axes) + 1))
    cut = draw.randrange(len(chosen) + 1)
    return P(chosen[:cut], chosen[cut:])


@pytest.mark.parametrize("seed", by_default([0, 1], [0]))
def test_between_random_specs(seed: int) -> None:
    draw = random.Random(seed)
    cases = [(random_spec(draw), random_spec(draw)) for _ in range(8)]
    value, gradient = whole_tensor(0), whole_tensor(1)

    def check() -> None:
        mesh = Mesh(SIZES)
        for source, target in cases:
            before = laid(value, mesh, source)
            after = redistribute(before, NamedSharding(mesh, target))
            assert after.placements == NamedSharding(mesh, target).placements
            assert after.to_local().equal(part_by_definition(value, target, mesh)), (source, target)
            after.backward(laid(gradient, mesh, target).detach())
            assert isinstance(before.grad, DTensor) and before.grad.placements == before.placements
            assert before.grad.to_local().equal(part_by_definition(gradient, source, mesh)), (source, target)

    run_ranks(check, 8)


def test_from_plain_tensors_and_back() -> None:
    draw = random.Random(1)
    value, gradient = whole_tensor(0), whole_tensor(1)
    specs = [random_spec(draw, ("fsdp", "expert")) for _ in range(6)]

    def check() -> None:
        mesh = Mesh({"fsdp": 2, "expert": 2})
        for spec in specs:
            before = value.clone().requires_grad_()
            after = redistribute(before, NamedSharding(mesh, spec))
            assert after.to_local().equal(part_by_definition(value, spec, mesh)), spec
            after.backward(laid(gradient, mesh, spec).detach())
            assert before.grad is not None and before.grad.equal(gradient), spec

    run_ranks(check, 4)


def test_sums_that_nobody_has_taken() -> None:
    value, gradient = whole_tensor(0), whole_tensor(1)

    def check(spec: PartitionSpec) -> None:
        mesh = Mesh({"fsdp": 2, "expert": 2})
        summand = (value * (0.25, 0.75)[mesh.coordinates()["expert"]]).requires_grad_()
        sums = DTensor.from_local(summand, mesh.device_mesh, (Replicate(), Partial()), run_check=False)
        after = redistribute(sums, NamedSharding(mesh, spec))
        assert_same(after.to_local(), part_by_definition(value, spec, mesh))
        after.backward(laid(gradient, mesh, spec).detach())
        assert summand.grad is not None and summand.grad.equal(gradient)

    run_cases(check, 4, [(P(None, None),), (P("expert", None),), (P(("expert", "fsdp"), None),)])


def test_what_cannot_be_resharded() -> None:
    with fake_rank(0, 4):
        mesh, other = Mesh({"fsdp": 2, "expert": 2}), Mesh({"fsdp": 4})
        tensor = laid(whole_tensor(), other, P("fsdp", None))
        message = f"the tensor is on {other.device_mesh}, the sharding on {mesh.device_mesh}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            redistribute(tensor, NamedSharding(mesh, P("fsdp", None)))
        message = "dim 0 of the shape (3, 4) is not divisible by fsdp=2"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            redistribute(torch.zeros(3, 4), NamedSharding(mesh, P("fsdp", None)))
        message = "P('fsdp', None) has 2 dims, the shape (4,) has 1"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            redistribute(torch.zeros(4), NamedSharding(mesh, P("fsdp", None)))


def random_redistributions(count: int, mesh: Mesh) -> Iterator[tuple[NamedSharding, NamedSharding]]:
    """Any sharding to any other; partial axes are all-reduced, reduce-scattered or stay partial."""
    draw = random.Random(2)
    for _ in range(count):
        source = random_spec(draw)
        sums = [axis for axis in SIZES if not any(axis in axes for axes in source) and draw.random() < 0.7]
        left = [axis for axis in sums if draw.random() < 0.3]
        target = random_spec(draw, tuple(axis for axis in SIZES if axis not in left))
        yield NamedSharding(mesh, source, tuple(sums)), NamedSharding(mesh, target, tuple(left))


def places(sharding: NamedSharding) -> dict[str, Any]:
    """For every axis: the dim that it shards and the number of axes before it in this dim, or that it is partial."""
    found: dict[str, Any] = dict.fromkeys(sharding.partial, "partial")
    for dim, axes in enumerate(sharding.spec):
        for index, axis in enumerate(axes):
            assert axis not in found
            found[axis] = (dim, index)
    return found


def test_every_step_of_a_redistribution_changes_one_axis() -> None:
    longest = 0
    for source, target in random_redistributions(500, Mesh.planned(SIZES)):
        steps = [source, *(step.after for step in redistribution_steps(source, target))]
        assert steps[-1].spec == target.spec and set(steps[-1].partial) == set(target.partial)
        for before, after in itertools.pairwise(steps):
            old, new = places(before), places(after)
            assert len([axis for axis in SIZES if old.get(axis) != new.get(axis)]) == 1, (before, after)
        assert len(steps) - 1 <= 2 * len(SIZES)
        longest = max(longest, len(steps) - 1)
    assert longest > 3


def summand(whole: Tensor, sharding: NamedSharding) -> Tensor:
    """This rank's summand: the summands of all ranks add up to the part of the whole."""
    part, factor = part_by_definition(whole, sharding.spec, sharding.mesh), 1.0
    for axis in sharding.partial:
        factor *= (0.25, 0.75)[sharding.mesh.coordinates()[axis]]
    return part * factor


def test_redistributions_keep_values() -> None:
    value, gradient = whole_tensor(0), whole_tensor(1)

    def check() -> None:
        mesh = Mesh(SIZES)
        for source, target in random_redistributions(20, mesh):
            part = summand(value, source)
            result = redistribute_local(part, Redistribution((source, target), (target, target)), "x").clone()
            for axis in target.partial:
                dist.all_reduce(result, group=mesh[axis].get_group())
            assert_same(result, part_by_definition(value, target.spec, mesh), f"{source} to {target}")

        for source, target in random_redistributions(10, mesh):  # the same of the gradient
            spec = NamedSharding(mesh, target.spec)
            leaf = part_by_definition(value, spec.spec, mesh).clone().requires_grad_()
            there = NamedSharding(mesh, source.spec)
            result = redistribute_local(leaf, Redistribution((spec, there), (source, target)), "x")
            result.backward(summand(gradient, source))
            assert leaf.grad is not None
            received = leaf.grad.clone()
            for axis in target.partial:
                dist.all_reduce(received, group=mesh[axis].get_group())
            assert_same(received, part_by_definition(gradient, target.spec, mesh), f"{source} to {target}")

    run_ranks(check, 8)
