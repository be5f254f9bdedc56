"""Named tuples whose fields are computed when they are read."""

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from maxmoe.deferred import Deferred, deferred


class Point(NamedTuple):
    x: int
    y: int
    z: int

    @property
    def total(self) -> int:
        return self.x + self.y + self.z


class Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Point:
        self.calls += 1
        return Point(1, 2, 3)


def make() -> tuple[Point, Counted]:
    compute = Counted()
    return deferred(Point, compute), compute


READS: dict[str, Callable[[Any], Any]] = {
    "field": lambda point: point.y,
    "property": lambda point: point.total,
    "unpacked": lambda point: [*point],
    "index": lambda point: point[2],
    "slice": lambda point: point[:2],
    "sum": lambda point: operator.add(point, (4,)),
    "repr": repr,
    "equal": lambda point: point == (1, 2, 3),
    "unequal": lambda point: point != (1, 2, 3),
    "hash": hash,
    "contains": lambda point: 3 in point,
    "dict": lambda point: point._asdict(),
    "replaced": lambda point: point._replace(y=7),
    "pickled": lambda point: pickle.loads(pickle.dumps(point)),
    "copied": copy.deepcopy,
    "mapped": lambda point: pytree.tree_map(lambda value: value + 1, point),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_as_the_ordinary_tuple_does(read: Callable[[Any], Any]) -> None:
    point, compute = make()
    assert isinstance(point, Point) and isinstance(point, tuple) and len(point) == 3
    got, expected = read(point), read(Point(1, 2, 3))
    assert got == expected and type(got) is type(expected)
    assert read(point) == expected and compute.calls == 1


def test_nothing_is_computed_before() -> None:
    point, compute = make()
    assert isinstance(point, Deferred) and compute.calls == 0


def test_messages_of_torch_name_the_ordinary_type() -> None:
    point, _ = make()
    assert isinstance(point, Deferred) and type(point).__name__ == "Point"
    with pytest.raises(TypeError, match="not Point"):
        torch.nn.functional.linear(point, torch.ones(1, 1))  # type: ignore[arg-type]
