"""The text of `python -m maxmoe info` about waiting threads, and the behaviour of libgomp that it describes."""

import os
import sys
from pathlib import Path

import pytest

import maxmoe
from maxmoe.cli.waiting_threads import describe_waiting, waiting_of_this_process
from support import programs

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
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 2, 6.5, BUSY),
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


# The second thread waits in the pause of the first one. While it spins, it uses a processor.
PAUSE = """
import os, time, torch
x = torch.ones(1 << 18)
torch.set_num_threads(2)
def used_in_pause():
    x.add_(1)
    before = time.process_time()
    time.sleep(0.001)
    return time.process_time() - before
print(sum(used_in_pause() for _ in range(200)))
"""


def seconds_spun(**environment: str) -> float:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    return float(programs.printed(programs.python(PAUSE, env=inherited | environment)))


@pytest.mark.skipif(sys.platform != "linux", reason="torch uses libgomp on Linux")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="libgomp never spins long on one processor")
@pytest.mark.slow
def test_a_bounded_spin_leaves_the_processor_to_others() -> None:
    bounded = seconds_spun(GOMP_SPINCOUNT="1000")
    unbounded = seconds_spun(GOMP_SPINCOUNT="infinite")
    assert bounded < 0.7 * unbounded


@pytest.mark.parametrize("example", ["pretrain.py", "train_minimal.py"])
def test_examples_bound_the_spin_before_torch_is_imported(example: str) -> None:
    text = (Path(maxmoe.__file__).parents[1] / "examples" / example).read_text()
    assert text.index('os.environ.setdefault("GOMP_SPINCOUNT", "1000")') < text.index("import torch")
