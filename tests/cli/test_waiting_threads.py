"""The text of `python -m maxmoe info` about waiting threads."""

import pytest

from maxmoe.cli.waiting_threads import describe_waiting, waiting_of_this_process

QUIET = "spin for milliseconds: beside other processes, set GOMP_SPINCOUNT=1000 before torch is imported"
BUSY = (
    "spin for milliseconds, and 6.5 processes want 2 processors: beside other processes, set GOMP_SPINCOUNT=1000 "
    "before torch is imported"
)


@pytest.mark.parametrize(
    ("environment", "threads", "load", "expected"),
    [
        ({}, 2, 1.0, QUIET),
        ({}, 2, 6.5, BUSY),
        ({"GOMP_SPINCOUNT": "infinite"}, 2, 6.5, BUSY),
        ({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "300000"}, 2, 6.5, BUSY),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, 2, 6.5, "sleep at once"),
        ({"GOMP_SPINCOUNT": "1000"}, 2, 6.5, "spin 1000 times, then sleep"),
        ({}, 1, 6.5, "not for each other: there is one thread"),
    ],
)
def test_what_is_said(environment: dict[str, str], threads: int, load: float, expected: str) -> None:
    assert describe_waiting(environment, num_threads=threads, load=load, num_processors=2) == expected


def test_of_this_process() -> None:
    assert waiting_of_this_process(1) in (
        "not for each other: there is one thread",
        "unknown: torch does not use libgomp",
    )
