"""Private names of `torch.distributed` with which a process is one rank of a world of many, without the others."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from maxmoe._torch import process_group_named

_numbers = itertools.count()


def _new_name(*_: object, **__: object) -> str:
    """Return a name that no group of the process has: all groups have their names in one table."""
    return f"fake {next(_numbers)}"


class _FakeWorld(c10d._World):
    """Process groups of a fake world, apart from the groups of the process; torch allows its world to be replaced."""

    group_count = 0

    def __init__(self) -> None:
        super().__init__()
        tables: list[dict[Any, Any]] = [{} for _ in range(6)]
        self._map, self._names, self._ranks, self._config, self._to_tag, self._of_tag = tables

    pg_map = property(lambda self: self._map)
    pg_names = property(lambda self: self._names)
    pg_group_ranks = property(lambda self: self._ranks)
    pg_backend_config = property(lambda self: self._config)
    pg_to_tag = property(lambda self: self._to_tag)
    tags_to_pg = property(lambda self: self._of_tag)


# By the number of ranks, because meshes and their groups are cached by world.
_worlds: dict[int, _FakeWorld] = {}


def _world_of(num_ranks: int) -> _FakeWorld:
    """Return the world of a number of ranks; a new one if `destroy_process_group` has unregistered all groups."""
    world = _worlds.setdefault(num_ranks, _FakeWorld())
    if world.default_pg is not None:
        try:
            process_group_named(world.pg_names[world.default_pg])
        except RuntimeError:
            world = _worlds[num_ranks] = _FakeWorld()
    return world


_lock = RLock()  # the world of torch is one of the process


@contextmanager
def fake_world(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of `num_ranks` ranks in the context; its own process groups are back afterwards.

    Collectives return at once: a gather has this rank's values for every rank, other results are not written. Other
    threads must not communicate meanwhile; those that enter a fake world wait.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # loads the compiler
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    with _lock:
        # Meshes of both worlds may be equal: cached results of operators on DTensors would have the other one's mesh.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        world, before = _world_of(num_ranks), c10d._world
        try:
            with (
                mock.patch.object(c10d, "_world", world),
                mock.patch.object(c10d, "_process_group_name", _new_name),
                mock.patch.object(sys, "excepthook"),
            ):
                if world.default_pg is None:
                    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
                c10d._update_default_pg(world.default_pg)
                yield
        finally:
            _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
            c10d._update_default_pg(before.default_pg)
