"""Tensors brought from one sharding to another: values and gradients on real ranks against one process."""

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

from maxmoe.sharding import Mesh, NamedSharding, P, PartitionSpec, reshard
from maxmoe.sharding.movement import Layout, Move, move
from support.parts import assert_same, laid, part_by_definition, whole_tensor
from support.run_ranks import fake_rank, run_ranks

SIZES = {"data": 2, "fsdp": 2, "expert": 2}


def random_spec(draw: random.Random, axes: tuple[str, ...] = tuple(SIZES)) -> PartitionSpec:
    """Some of the axes in some order, cut into one part per dim."""
    chosen = draw.sample(axes, draw.randrange(len(axes) + 1))
    cut = draw.randrange(len(chosen) + 1)
    return P(chosen[:cut], chosen[cut:])


def test_between_random_specs() -> None:
    draw = random.Random(0)
    cases = [(random_spec(draw), random_spec(draw)) for _ in range(24)]
    value, gradient = whole_tensor(0), whole_tensor(1)

    def check() -> None:
        mesh = Mesh(SIZES)
        for source, target in cases:
            before = laid(value, mesh, source)
            after = reshard(before, NamedSharding(mesh, target))
            assert after.placements == NamedSharding(mesh, target).placements
            assert after.to_local().equal(part_by_definition(value, target, mesh)), (source, target)
            after.backward(laid(gradient, mesh, target).detach())
            assert isinstance(before.grad, DTensor)
            assert before.grad.full_tensor().equal(gradient), (source, target)

    run_ranks(check, 8)


def test_from_plain_tensors_and_back() -> None:
    draw = random.Random(1)
    value, gradient = whole_tensor(0), whole_tensor(1)
    specs = [random_spec(draw, ("fsdp", "expert")) for _ in range(6)]

    def check() -> None:
        mesh = Mesh({"fsdp": 2, "expert": 2})
        for spec in specs:
            before = value.clone().requires_grad_()
            after = reshard(before, NamedSharding(mesh, spec))
            assert after.to_local().equal(part_by_definition(value, spec, mesh)), spec
            after.backward(laid(gradient, mesh, spec).detach())
            assert before.grad is not None and before.grad.equal(gradient), spec

    run_ranks(check, 4)


@pytest.mark.parametrize("spec", [P(None, None), P("expert", None), P(("expert", "fsdp"), None)], ids=repr)
def test_sums_that_nobody_has_taken(spec: PartitionSpec) -> None:
    value, gradient = whole_tensor(0), whole_tensor(1)

    def check() -> None:
        mesh = Mesh({"fsdp": 2, "expert": 2})
        summand = (value * (0.25, 0.75)[mesh.coordinates()["expert"]]).requires_grad_()
        sums = DTensor.from_local(summand, mesh.device_mesh, (Replicate(), Partial()), run_check=False)
        after = reshard(sums, NamedSharding(mesh, spec))
        assert_same(after.to_local(), part_by_definition(value, spec, mesh))
        after.backward(laid(gradient, mesh, spec).detach())
        assert summand.grad is not None and summand.grad.equal(gradient)

    run_ranks(check, 4)


def test_what_cannot_be_resharded() -> None:
    with fake_rank(0, 4):
        mesh, other = Mesh({"fsdp": 2, "expert": 2}), Mesh({"fsdp": 4})
        tensor = laid(whole_tensor(), other, P("fsdp", None))
        message = f"the tensor is on {other.device_mesh}, the sharding on {mesh.device_mesh}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            reshard(tensor, NamedSharding(mesh, P("fsdp", None)))
        message = "dim 0 of the shape (3, 4) is not divisible by fsdp=2"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            reshard(torch.zeros(3, 4), NamedSharding(mesh, P("fsdp", None)))
        message = "P('fsdp', None) has 2 dims, the shape (4,) has 1"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            reshard(torch.zeros(4), NamedSharding(mesh, P("fsdp", None)))


def random_moves(count: int) -> Iterator[Move]:
    """Any sharding to any other; sums are taken, scattered or left."""
    draw = random.Random(2)
    for _ in range(count):
        source = random_spec(draw)
        sums = [axis for axis in SIZES if not any(axis in axes for axes in source) and draw.random() < 0.7]
        left = [axis for axis in sums if draw.random() < 0.3]
        target = random_spec(draw, tuple(axis for axis in SIZES if axis not in left))
        yield Move(Layout(source, tuple(sums)), Layout(target, tuple(left)))


def places(layout: Layout) -> dict[str, Any]:
    """Of every axis: the dim that it shards and how many axes do so before it, or that it is a sum."""
    found: dict[str, Any] = dict.fromkeys(layout.sums, "sum")
    for dim, axes in enumerate(layout.spec):
        for index, axis in enumerate(axes):
            assert axis not in found
            found[axis] = (dim, index)
    return found


def test_every_step_of_a_move_changes_one_axis() -> None:
    mesh, longest = Mesh.planned(SIZES), 0
    for step in random_moves(500):
        steps = [step.source, *step.steps(mesh)]
        assert steps[-1].spec == step.target.spec and set(steps[-1].sums) == set(step.target.sums)
        for before, after in itertools.pairwise(steps):
            old, new = places(before), places(after)
            assert len([axis for axis in SIZES if old.get(axis) != new.get(axis)]) == 1, (before, after)
        assert len(steps) - 1 <= 2 * len(SIZES)
        longest = max(longest, len(steps) - 1)
    assert longest > 3


def summand(whole: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """This rank's: they differ, and their sum is the part of the whole."""
    part, factor = part_by_definition(whole, layout.spec, mesh), 1.0
    for axis in layout.sums:
        factor *= (0.25, 0.75)[mesh.coordinates()[axis]]
    return part * factor


def test_moves_keep_values() -> None:
    value, gradient = whole_tensor(0), whole_tensor(1)

    def check() -> None:
        mesh = Mesh(SIZES)
        for step in random_moves(40):
            stay = Move(step.target, step.target)
            moved = move(summand(value, step.source, mesh), mesh, step, stay).clone()
            for axis in step.target.sums:
                dist.all_reduce(moved, group=mesh[axis].get_group())
            assert_same(moved, part_by_definition(value, step.target.spec, mesh), repr(step))

        for step in random_moves(10):  # the same as moves of the gradient
            spec = Layout(step.target.spec)
            leaf = part_by_definition(value, spec.spec, mesh).clone().requires_grad_()
            sums = summand(gradient, step.source, mesh)
            there = Move(spec, Layout(step.source.spec))
            move(leaf, mesh, there, step).backward(sums)
            assert leaf.grad is not None
            received = leaf.grad.clone()
            for axis in step.target.sums:
                dist.all_reduce(received, group=mesh[axis].get_group())
            assert_same(received, part_by_definition(gradient, step.target.spec, mesh), repr(step))

    run_ranks(check, 8)
