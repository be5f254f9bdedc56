"""Run a function on several ranks, one process each, which communicate through gloo: see rank_server."""

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from maxmoe.ranks.rank_processes import PRELOADED, RankProcesses
from maxmoe.sharding import LogicalRules
from maxmoe.sharding.rules import PRESETS
from support.call_in_fork import call_in_fork
from support.named import named

AT_ONCE = 6  # with four ranks each
LONGER = 60.0  # seconds after the deadline of the ranks, when their stacks should have come

for module in PRELOADED:
    importlib.import_module(module)  # once, in the server, and not in every rank
for preset in PRESETS.glob("*.yaml"):
    LogicalRules.load(preset.stem)  # keeps the rules: parsed once


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
    return call_in_fork(processes.run, function, world_size, *arguments, seconds=deadline + LONGER)


def run_alone(function: Callable[..., Any], *arguments: Any, deadline: float = 120.0) -> Any:
    """Call a function in a process that is not a rank, and return its result."""
    __tracebackhide__ = True
    processes = RankProcesses("fork", deadline=deadline, prepare=partial(prepare, False))
    return call_in_fork(processes.run_alone, function, *arguments, seconds=deadline + LONGER)


def run_cases(
    check: Callable[..., object], world_size: int, cases: Iterable[tuple[Any, ...]], timeout: float = 60.0
) -> None:
    """Call a function with the arguments of each case on the same ranks; an error begins with its case."""
    all_cases = list(cases)

    def check_all() -> None:
        for case in all_cases:
            with named(*case):
                check(*case)

    run_ranks(check_all, world_size, timeout=timeout)


def check_at_once(check: Callable[..., object], cases: Iterable[tuple[Any, ...]]) -> None:
    """Call a function with the arguments of each case, some at the same time; an error begins with its case.

    For cases that wait for timeouts most of their time. Each case has its own ranks.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        checks = [(case, pool.submit(check, *case)) for case in cases]
    for case, done in checks:
        with named(*case):
            done.result()


def prepare(debug: bool) -> None:
    """Initialize the process of a rank."""
    torch.default_generator.manual_seed(0)
    dist.set_debug_level(dist.DebugLevel.DETAIL if debug else dist.DebugLevel.OFF)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


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
        # The cache holds meshes of the fake group, and would return them for equal meshes of later groups.
        _clear_sharding_prop_cache()
