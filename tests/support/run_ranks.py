"""Run a function on several ranks, each a forked process that talks to the others through gloo.

Forking takes a hundredth of the time of starting: the children have torch and everything else already.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from maxmoe._torch import import_distributed
from maxmoe.sharding import LogicalRules
from maxmoe.sharding.rules import PRESETS
from maxmoe.testing.rank_processes import RankProcesses

import_distributed()  # once, here, and not in every child
for preset in PRESETS.glob("*.yaml"):
    LogicalRules.load(preset.stem)  # keeps the rules: parsed once, here, and not in every child


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 60.0,
    deadline: float = 120.0,
    debug: bool = False,
) -> list[Any]:
    """Call a function on every rank, closures included, and return the results by rank; see `RankProcesses`.

    `debug` compares the collectives of all ranks before they run, which takes half as much time again.
    """
    __tracebackhide__ = True  # by pytest
    processes = RankProcesses("fork", timeout, deadline, partial(prepare, debug))
    return processes.run(function, world_size, *arguments)


def run_cases(
    check: Callable[..., object], world_size: int, cases: Iterable[tuple[Any, ...]], timeout: float = 60.0
) -> None:
    """Call a function with the arguments of each case on the same ranks; an error begins with its case."""

    def check_all() -> None:
        for case in cases:
            with named(*case):
                check(*case)

    run_ranks(check_all, world_size, timeout=timeout)


def prepare(debug: bool) -> None:
    """What a forked process does first."""
    # Torch notes the stack for messages of its own at the first operator of a DTensor with each shape: 0.3 ms below
    # the frames of pytest. Tracebacks of exceptions do not come from here.
    traceback.extract_stack = lambda *_arguments, **_options: traceback.StackSummary()
    dist.set_debug_level(dist.DebugLevel.DETAIL if debug else dist.DebugLevel.OFF)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # All ranks of a process of pytest-xdist on one processor: to wake a rank on another takes longer than what most of
    # them do with the message.
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[int(worker.removeprefix("gw")) % len(processors)]})


@contextmanager
def named(*names: object) -> Iterator[None]:
    """Add the name of the case to its error, where several cases run on the same ranks."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"{', '.join(map(str, names))}: {error}") from error


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of a large world whose collectives return at once, without values."""
    hook = sys.excepthook  # torch puts the number of the rank before every line of a traceback
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        sys.excepthook = hook
        dist.destroy_process_group()
        # It holds meshes of the fake group, and would hand them to equal ones of ranks that are forked later.
        _clear_sharding_prop_cache()
