"""Moves between shardings, stated and automatic: values and gradients on real ranks against one process."""

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from maxmoe.models.decoder import FeedForward
from maxmoe.sharding import LogicalRules, Mesh, NamedSharding, P, PartitionSpec, reshard, shard_map, shard_parameters
from maxmoe.sharding.movement import Layout, Move, move
from support.parts import assert_same, part_by_definition
from support.run_ranks import fake_rank, run_ranks

SIZES = {"data": 2, "fsdp": 2, "expert": 2}
SHAPE = (8, 16)


def random_spec(draw: random.Random, axes: tuple[str, ...] = tuple(SIZES)) -> PartitionSpec:
    """Some of the axes in some order, cut into one part per dim."""
    chosen = draw.sample(axes, draw.randrange(len(axes) + 1))
    cut = draw.randrange(len(chosen) + 1)
    return P(chosen[:cut], chosen[cut:])


def whole_tensor(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def laid(whole: Tensor, mesh: Mesh, spec: PartitionSpec) -> DTensor:
    """This rank's part by definition, as a leaf."""
    part = part_by_definition(whole, spec, mesh).contiguous()
    placements = NamedSharding(mesh, spec).placements
    return DTensor.from_local(part, mesh.device_mesh, placements, run_check=False).detach().requires_grad_()


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


def feed_forward(x: Tensor, scale: float, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    hidden = F.silu(x @ up)
    return hidden @ down * scale, hidden


IN_SPECS = (P("data", None), None, P(None, "expert"), P("expert", None))
OUT_SPECS = (P("data", None), P("data", "expert"))


@pytest.mark.parametrize(
    "sizes", [{"data": 2, "fsdp": 2, "expert": 2}, {"expert": 2, "data": 1}, {"data": 2, "expert": 1}], ids=str
)
def test_shard_map_of_tokens_and_weights(sizes: dict[str, int]) -> None:
    """Data parallel, tensor parallel with a sum in the end, and an axis on which all ranks do the same."""
    inputs = {"x": whole_tensor(0), "up": whole_tensor(1, (16, 4)), "down": whole_tensor(2, (4, 16))}
    gradient = whole_tensor(3)
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    expected, hidden = feed_forward(leaves["x"], 0.5, leaves["up"], leaves["down"])
    expected.backward(gradient)

    def check() -> None:
        mesh = Mesh(sizes)
        stored = P(None, "fsdp" if "fsdp" in sizes else None)  # shard_map brings them to where the function wants them
        ours = {name: laid(value, mesh, stored) for name, value in inputs.items()}
        mapped = shard_map(feed_forward, mesh, IN_SPECS, OUT_SPECS, partial=("expert",))
        summands, hidden_parts = mapped(ours["x"], 0.5, ours["up"], ours["down"])
        assert_same(hidden_parts.to_local(), part_by_definition(hidden, OUT_SPECS[1], mesh), "hidden")
        output = reshard(summands, NamedSharding(mesh, OUT_SPECS[0]))
        assert_same(output.to_local(), part_by_definition(expected, OUT_SPECS[0], mesh), "output")
        output.backward(laid(gradient, mesh, OUT_SPECS[0]).detach())
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            assert_same(ours[name].grad.full_tensor(), leaf.grad, name)

    run_ranks(check, Mesh.planned(sizes).num_ranks)


def test_shard_map_of_one_output() -> None:
    value = whole_tensor()

    def check() -> None:
        mesh = Mesh({"expert": 2})
        rows = P("expert", None)
        doubled = shard_map(lambda x: 2 * x, mesh, [rows], rows)(laid(value, mesh, rows))
        assert isinstance(doubled, DTensor) and doubled.full_tensor().equal(2 * value)
        total = shard_map(lambda x: x.sum(0), mesh, [rows], P(None), partial=("expert",))
        assert_same(total(laid(value, mesh, P(None, "expert"))).full_tensor(), value.sum(0))

    run_ranks(check, 2)


def test_shard_map_refuses_a_sum_taken_inside() -> None:
    mesh = Mesh.planned({"data": 2, "one": 1, "expert": 2})
    message = (
        "axis 'expert' shards input 2 (P('expert', None)) and no output: return the unreduced sum and name the axis "
        "in partial, got partial=('data',)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        shard_map(feed_forward, mesh, [P("data", "one"), None, P("expert", None)], P("data", None), partial=("data",))


def test_dtensor_propagates_what_was_not_stated() -> None:
    """Automatic use: a module whose parameters are DTensors takes DTensors."""
    whole, x, gradient = FeedForward(16, 8).double(), whole_tensor(0), whole_tensor(1)
    leaf = x.clone().requires_grad_()
    expected = whole(leaf)
    expected.backward(gradient)
    rules = LogicalRules([("mlp", "tensor"), ("embed", "fsdp")])

    def check() -> None:
        mesh = Mesh({"fsdp": 2, "tensor": 2})
        ours = FeedForward(16, 8).double()
        ours.load_state_dict(whole.state_dict())
        shard_parameters(ours, mesh, rules)
        tokens = laid(x, mesh, P("fsdp", None))
        output = ours(tokens)
        assert isinstance(output, DTensor)
        assert_same(output.full_tensor(), expected)
        output.backward(reshard(gradient, NamedSharding(mesh, P("fsdp", None))))
        assert leaf.grad is not None and isinstance(tokens.grad, DTensor)
        assert_same(tokens.grad.full_tensor(), leaf.grad)
        for name, parameter in whole.named_parameters():
            assert_same(ours.get_parameter(name).grad.full_tensor(), parameter.grad, name)

    run_ranks(check, 4)


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
