"""Redistribution of tensors: values and gradients on real ranks against one process."""

import random
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from maxmoe.sharding import Mesh, NamedSharding, P, PartitionSpec, redistribute
from maxmoe.sharding.redistribute import Redistribution, redistribute_local
from support.parts import assert_same, laid, part_by_definition, whole_tensor
from support.run_ranks import fake_rank, run_ranks

SIZES = {"data": 2, "fsdp": 2, "expert": 2}


def random_spec(draw: random.Random, axes: tuple[str, ...] = tuple(SIZES)) -> PartitionSpec:
    """Random axes in random order, distributed over the dims."""
    chosen = draw.sample(axes, draw.randrange(len(axes) + 1))
    cut = draw.randrange(len(chosen) + 1)
    return P(chosen[:cut], chosen[cut:])


def test_between_specs_from_plain_tensors_and_from_sums() -> None:
    draw = random.Random(0)
    pairs = [(random_spec(draw), random_spec(draw)) for _ in range(8)]
    value, gradient = whole_tensor(0), whole_tensor(1)

    def check() -> None:
        mesh = Mesh(SIZES)
        for source, target in pairs:
            sharding, expected = NamedSharding(mesh, target), part_by_definition(value, target, mesh)
            before, plain = laid(value, mesh, source), value.clone().requires_grad_()
            summand = (value * (0.25, 0.75)[mesh.coordinates()["expert"]]).requires_grad_()
            placements = (Replicate(), Replicate(), Partial())
            sums = DTensor.from_local(summand, mesh.device_mesh, placements, run_check=False)
            for tensor in (before, plain, sums):
                after = redistribute(tensor, sharding)
                assert after.placements == sharding.placements
                assert_same(after.to_local(), expected, f"{source} to {target}")
                after.backward(laid(gradient, mesh, target).detach())
            assert isinstance(before.grad, DTensor) and before.grad.placements == before.placements
            assert before.grad.to_local().equal(part_by_definition(gradient, source, mesh)), (source, target)
            assert plain.grad is not None and plain.grad.equal(gradient), target
            assert summand.grad is not None and summand.grad.equal(gradient), target

    run_ranks(check, 8)


def test_what_cannot_be_resharded() -> None:
    with fake_rank(0, 4):
        mesh, other = Mesh({"fsdp": 2, "expert": 2}), Mesh({"fsdp": 4})
        cases = [
            (
                laid(whole_tensor(), other, P("fsdp", None)),
                f"the tensor is on {other.device_mesh}, the sharding on {mesh.device_mesh}",
            ),
            (torch.zeros(3, 4), "dim 0 of the shape (3, 4) is not divisible by fsdp=2"),
            (torch.zeros(4), "P('fsdp', None) has 2 dims, the shape (4,) has 1"),
        ]
        for tensor, message in cases:
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                redistribute(tensor, NamedSharding(mesh, P("fsdp", None)))


def random_redistributions(count: int, mesh: Mesh) -> Iterator[tuple[NamedSharding, NamedSharding]]:
    """Any sharding to any other; partial axes are all-reduced, reduce-scattered or stay partial, others become partial.

    The first sharding has no axis, and all become partial.
    """
    draw = random.Random(2)
    yield NamedSharding(mesh, P(None, None)), NamedSharding(mesh, P(None, None), tuple(SIZES))
    for _ in range(count):
        source = random_spec(draw)
        sums = [axis for axis in SIZES if not any(axis in axes for axes in source) and draw.random() < 0.7]
        left = [axis for axis in sums if draw.random() < 0.3]
        target = random_spec(draw, tuple(axis for axis in SIZES if axis not in left))
        yield NamedSharding(mesh, source, tuple(sums)), NamedSharding(mesh, target, tuple(left))


def summand(whole: Tensor, sharding: NamedSharding) -> Tensor:
    """This rank's summand: the summands of all ranks add up to the part of the whole."""
    part, factor = part_by_definition(whole, sharding.spec, sharding.mesh), 1.0
    for axis in sharding.partial:
        factor *= (0.25, 0.75)[sharding.mesh.coordinates()[axis]]
    return part * factor


def all_reduced(tensor: Tensor, sharding: NamedSharding) -> Tensor:
    total = tensor.clone()
    for axis in sharding.partial:
        dist.all_reduce(total, group=sharding.mesh[axis].get_group())
    return total


def test_redistributions_keep_values() -> None:
    value, gradient = whole_tensor(0), whole_tensor(1)

    def check() -> None:
        mesh = Mesh(SIZES)
        for source, target in random_redistributions(20, mesh):
            result = redistribute_local(summand(value, source), Redistribution((source, target), (target, target)), "x")
            expected = part_by_definition(value, target.spec, mesh)
            assert_same(all_reduced(result, target), expected, f"{source} to {target}")

            # The same of the gradient.
            spec, there = NamedSharding(mesh, target.spec), NamedSharding(mesh, source.spec)
            leaf = expected.clone().requires_grad_()
            result = redistribute_local(leaf, Redistribution((spec, there), (source, target)), "x")
            result.backward(summand(gradient, source))
            assert leaf.grad is not None
            received = all_reduced(leaf.grad, target)
            assert_same(received, part_by_definition(gradient, target.spec, mesh), f"{source} to {target}")

    run_ranks(check, 8)
