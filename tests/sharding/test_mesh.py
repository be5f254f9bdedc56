"""Mesh: sizes, coordinates, groups and their timeouts; the same errors on every rank."""

import itertools
import pickle
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from maxmoe.sharding import Mesh, parse_mesh
from support.messages import error_of
from support.run_ranks import fake_rank, run_ranks


@pytest.mark.parametrize(
    ("sizes", "world_size", "filled"),
    [
        ({"fsdp": 2, "expert": 4}, 8, {"fsdp": 2, "expert": 4}),
        ({"fsdp": -1, "expert": 4}, 8, {"fsdp": 2, "expert": 4}),
        ({"fsdp": 2, "one": 1, "expert": -1}, 8, {"fsdp": 2, "one": 1, "expert": 4}),
        ({"fsdp": 8, "expert": -1}, 8, {"fsdp": 8, "expert": 1}),
        ({"fsdp": -1}, 1, {"fsdp": 1}),
        ({"fsdp": 4}, None, {"fsdp": 4}),
        ({}, 1, {}),
        ({}, None, {}),
    ],
)
def test_sizes_are_filled_in(sizes, world_size: int | None, filled) -> None:
    mesh = Mesh.planned(sizes, world_size=world_size)
    assert mesh.sizes == filled and list(mesh.sizes) == list(sizes)
    assert pickle.loads(pickle.dumps(mesh)).sizes == filled
    assert mesh.rank is None
    if world_size is not None:
        assert mesh.num_ranks == world_size
        with fake_rank(0, world_size):
            assert Mesh(sizes).sizes == filled


def test_axes_of_size_one_are_like_axes_that_are_not_there() -> None:
    mesh = Mesh.planned({"fsdp": 2, "one": 1, "expert": 3})
    assert mesh.axes == ("fsdp", "expert")
    assert mesh.size("one") == mesh.size("absent") == mesh.size() == 1
    assert mesh.size("expert", "absent", "fsdp", "one") == 6 == mesh.num_ranks
    with fake_rank(3, 6):
        assert Mesh(mesh.sizes).device_mesh.mesh_dim_names == ("fsdp", "expert")
    with fake_rank(0, 1):  # a world of one rank has a device mesh
        for sizes, name in (({}, "world"), ({"fsdp": 1, "expert": 1}, "fsdp")):
            mesh = Mesh(sizes)
            assert mesh.axes == () and mesh.num_ranks == 1
            assert mesh.device_mesh.mesh_dim_names == (name,) and mesh.device_mesh.shape == (1,)
            assert mesh.coordinates() == dict.fromkeys(sizes, 0)


def test_the_first_axis_is_the_outermost() -> None:
    mesh = Mesh.planned({"data": 2, "one": 1, "fsdp": 3, "expert": 2})
    places = list(itertools.product(range(2), range(1), range(3), range(2)))
    assert [tuple(mesh.coordinates(rank).values()) for rank in range(12)] == places
    assert list(mesh.coordinates(5)) == ["data", "one", "fsdp", "expert"]


def test_large_worlds() -> None:
    begin = time.process_time()
    with fake_rank(4095, 4096):
        mesh = Mesh({"data": 4, "fsdp": -1, "expert": 16})
        assert mesh.num_ranks == 4096
        assert tuple(mesh.device_mesh.get_coordinate() or ()) == tuple(mesh.coordinates().values())
        assert mesh["fsdp", "expert"].shape == (64, 16)
        assert 4095 in mesh["fsdp"].mesh
    assert time.process_time() - begin < 5


def wait_for_a_rank_that_stays_away(level: dist.DebugLevel) -> float:
    dist.set_debug_level(level)
    mesh = Mesh({"fsdp": 2, "expert": 2}, timeout=timedelta(seconds=1))
    begin = time.monotonic()
    axis = {1: "fsdp", 2: "expert"}.get(dist.get_rank())  # in groups with rank 3
    if axis is not None:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|failed to pass monitoredBarrier in 1000 ms"):
            dist.all_reduce(torch.ones(1), group=mesh[axis].get_group())
    return time.monotonic() - begin


@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])
def test_the_timeout_reaches_every_group(level: dist.DebugLevel) -> None:
    _, *victims, _ = run_ranks(wait_for_a_rank_that_stays_away, 4, level)
    assert all(0.9 < seconds < 100 for seconds in victims)


SIZE = "the size of the mesh axis 'fsdp' must be a positive int or -1, got"
BAD_SIZES = [
    ({"fsdp": 0}, f"{SIZE} 0"),
    ({"fsdp": -2}, f"{SIZE} -2"),
    ({"fsdp": True}, f"{SIZE} True"),
    ({"fsdp": "2"}, f"{SIZE} '2'"),
    ({"": 2}, "the size of the mesh axis '' must be a positive int or -1, got 2"),
    ({"data": -1, "fsdp": 2, "expert": -1}, "only one mesh axis may be -1, got ['data', 'expert']"),
    ({"fsdp": 2, "expert": 4}, "the mesh axes (fsdp=2, expert=4) make 8 ranks, and the world has 4"),
    ({"expert": 2}, "the mesh axes (expert=2) make 2 ranks, and the world has 4"),
    ({}, "the mesh axes () make 1 ranks, and the world has 4"),
    ({"fsdp": -1, "expert": 3}, "the mesh axes (fsdp=-1, expert=3) do not divide the world of 4"),
    ({"fsdp": -1, "expert": 8}, "the mesh axes (fsdp=-1, expert=8) do not divide the world of 4"),
]


def test_sizes_that_do_not_fit_are_refused_on_every_rank_alike() -> None:
    expected = [message for _, message in BAD_SIZES]
    assert [error_of(Mesh.planned, sizes, world_size=4) for sizes, _ in BAD_SIZES] == expected
    assert run_ranks(lambda: [error_of(Mesh, sizes) for sizes, _ in BAD_SIZES], 4) == [expected] * 4


MESH = Mesh.planned({"fsdp": 2, "expert": 4})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Mesh.planned({"fsdp": -1, "expert": 2}),
            "world_size must be given for a mesh with a -1: fsdp=-1, expert=2",
        ),
        (
            lambda: Mesh({"fsdp": 2}),
            "Mesh({'fsdp': 2}) needs torch.distributed: call torch.distributed.init_process_group first, "
            "in processes that torchrun started; Mesh.planned needs none",
        ),
        (lambda: MESH.device_mesh, "Mesh(fsdp=2, expert=4) is planned only: it has no process groups"),
        (lambda: MESH["fsdp"], "Mesh(fsdp=2, expert=4) is planned only: it has no process groups"),
        (MESH.coordinates, "rank must be given on the planned Mesh(fsdp=2, expert=4), got None"),
        (lambda: MESH.coordinates(-1), "rank must be from 0 to 7 on Mesh(fsdp=2, expert=4), got -1"),
        (lambda: MESH.coordinates(8), "rank must be from 0 to 7 on Mesh(fsdp=2, expert=4), got 8"),
        (lambda: parse_mesh("fsdp=2,expert=2,fsdp=2"), "the mesh axis 'fsdp' is there twice: 'fsdp=2,expert=2,fsdp=2'"),
    ],
)
def test_what_a_mesh_needs_and_what_a_planned_mesh_cannot_do(call: Callable[[], object], message: str) -> None:
    assert error_of(call) == message


@pytest.mark.parametrize("axes", [("one",), ("absent",), ("fsdp", "one"), ()], ids=str)
def test_sub_meshes_that_are_not_there(axes: tuple[str, ...]) -> None:
    has_no = "Mesh(fsdp=2, one=1, expert=4) has no sub-mesh of"
    with fake_rank(0, 8):
        found = error_of(Mesh({"fsdp": 2, "one": 1, "expert": 4}).__getitem__, axes)
    assert found == f"{has_no} {axes}: its axes larger than one are ('fsdp', 'expert')"


def test_sizes_from_a_command_line() -> None:
    for text, sizes in (("fsdp=2,expert=-1", {"fsdp": 2, "expert": -1}), ("b=16,a=1", {"b": 16, "a": 1}), ("", {})):
        assert parse_mesh(text) == sizes and list(parse_mesh(text)) == list(sizes)
    for part in ("fsdp", "fsdp=", "=2", "fsdp=two", "fsdp=2.0", "fsdp=--2", "fsdp=²", "fsdp:2", " fsdp=2"):
        message = f"a mesh must read like fsdp=2,expert=4, got {part!r} in 'expert=2,{part}'"
        assert error_of(parse_mesh, f"expert=2,{part}") == message
