"""PartitionSpec, and NamedSharding: the part of a tensor on every rank, against the definition and DTensor."""

import copy
import itertools
import pickle
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, distribute_tensor

from maxmoe.sharding import Mesh, NamedSharding, P, PartitionSpec
from support.parts import part_by_definition
from support.run_ranks import fake_rank

SIZES = {"data": 2, "fsdp": 2, "expert": 4}
SHAPE = (16, 32)


# PartitionSpec


def test_specs_are_tuples_of_axes() -> None:
    spec = P(None, "fsdp", ("expert", "tensor"), (), ["data"])
    assert list(spec) == [(), ("fsdp",), ("expert", "tensor"), (), ("data",)] and len(spec) == 5
    assert P("fsdp", None) == P(("fsdp",), ()) == PartitionSpec(["fsdp"], None)
    assert len({P("fsdp", None), P(("fsdp",), ()), P(None, "fsdp")}) == 2
    assert P(("fsdp", "expert")) != P(("expert", "fsdp")) and P("fsdp") != P("fsdp", None)
    assert repr(P()) == "P()" and repr(P(None, "fsdp", ("expert", "tensor"))) == "P(None, 'fsdp', ('expert', 'tensor'))"
    for again in (eval(repr(spec)), copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert again == spec and type(again) is PartitionSpec


ENTRY = "dim 0 of a PartitionSpec must be None, an axis or a tuple of axes, got"


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (
            ("fsdp", None, ("expert", "fsdp")),
            "axis 'fsdp' shards dim 0 and dim 2 of P('fsdp', None, ('expert', 'fsdp'))",
        ),
        ((None, ("fsdp", "fsdp")), "dim 1 of a PartitionSpec has the axis 'fsdp' twice: ('fsdp', 'fsdp')"),
        ((0,), f"{ENTRY} 0"),
        (("",), f"{ENTRY} ''"),
        (((None,),), f"{ENTRY} (None,)"),
        (({"fsdp"},), f"{ENTRY} {{'fsdp'}}"),
    ],
)
def test_errors_name_dims_and_axes(dims: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        P(*dims)


# NamedSharding


def all_specs(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[PartitionSpec]:
    """Every choice of axes for each dim, in every order, that divides the shape."""
    axes = tuple(mesh.sizes)
    for count in range(len(axes) + 1):
        for order in itertools.permutations(axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), len(shape) - 1):
                bounds = (0, *cuts, count)
                spec = P(*(order[begin:end] for begin, end in itertools.pairwise(bounds)))
                if all(length % mesh.size(*dim) == 0 for length, dim in zip(shape, spec, strict=True)):
                    yield spec


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_slices_are_the_part_by_definition() -> None:
    whole, mesh = numbered(*SHAPE), Mesh.planned(SIZES)
    specs = list(all_specs(mesh, SHAPE))
    assert len(set(specs)) == len(specs) == 49
    for spec, rank in itertools.product(specs, range(16)):
        sharding, part = NamedSharding(mesh, spec), part_by_definition(whole, spec, mesh, rank)
        assert whole[sharding.slices(SHAPE, rank)].equal(part), (spec, rank)
        assert sharding.shard_shape(SHAPE) == part.shape


@pytest.mark.parametrize("rank", [6, 15])
def test_dtensors_are_the_part_by_definition(rank: int) -> None:
    whole = numbered(*SHAPE)
    with fake_rank(rank, 16):
        mesh = Mesh(SIZES)
        for spec in all_specs(mesh, SHAPE):
            placements = NamedSharding(mesh, spec).placements
            laid = distribute_tensor(whole, mesh.device_mesh, placements, src_data_rank=None)
            assert laid.to_local().equal(part_by_definition(whole, spec, mesh)), (spec, placements)


def test_scalars_empty_dims_and_bytes() -> None:
    mesh = Mesh.planned(SIZES)
    scalar = NamedSharding(mesh, P())
    assert scalar.shard_shape(()) == () == scalar.slices((), rank=5)
    assert scalar.placements == (Replicate(), Replicate(), Replicate())
    assert scalar.bytes((), torch.float64) == 8
    empty = NamedSharding(mesh, P("expert", None))
    assert empty.shard_shape((0, 3)) == (0, 3) and empty.slices((0, 3), rank=3) == (slice(0, 0), slice(0, 3))
    sharding = NamedSharding(mesh, P(("expert", "fsdp"), None, "data"))
    assert sharding.bytes((16, 3, 4), torch.bfloat16) == 2 * 3 * 2 * 2
    assert sharding.bytes((16, 3, 4), torch.float64) == 2 * 3 * 2 * 8


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((16,), "P(('expert', 'fsdp'), None) has 2 dims, the shape (16,) has 1"),
        ((12, 5), "dim 0 of the shape (12, 5) is not divisible by expert=4 * fsdp=2"),
    ],
)
def test_shapes_that_do_not_fit(shape: tuple[int, ...], message: str) -> None:
    sharding = NamedSharding(Mesh.planned(SIZES), P(("expert", "fsdp"), None))
    for call in (
        sharding.shard_shape,
        lambda shape: sharding.slices(shape, 0),
        partial(sharding.bytes, dtype=torch.float32),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call(shape)


def test_what_a_mesh_lacks() -> None:
    mesh = Mesh.planned(SIZES)
    message = "axis 'tensor' shards dim 1 of P('fsdp', 'tensor'), but Mesh(data=2, fsdp=2, expert=4) has no such axis"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        NamedSharding(mesh, P("fsdp", "tensor"))
    with pytest.raises(ValueError, match=r"^rank must be given on the planned Mesh\(.*\), got None$"):
        NamedSharding(mesh, P("fsdp")).slices((4,))
