"""Run a function on several ranks, one process each, which communicate through gloo.

Ranks are forked from the forkserver of multiprocessing, which has imported what most tests import and has one thread. A
fork of pytest could wait without end for a lock that another of its threads held. A rank has the environment, working
folder and warning filters of the test, and seed 0; anything else must be set by the function that the rank runs, such
as the attributes of modules that a test replaces.
"""

import importlib
import io
import logging
import marshal
import multiprocessing
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import forkserver
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, ClassVar

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from maxmoe.ranks.rank_processes import RankProcesses
from support.named import named

AT_ONCE = 6  # with four ranks each
TESTS = Path(__file__).parents[1]


@cache
def start_server() -> None:
    """Start the process that ranks are forked from, where no library has threads, and wait until it is ready."""
    forkserver.set_forkserver_preload(["support.preloaded"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{os.environ['PYTHONPATH']}")
        environment.setenv("OPENBLAS_NUM_THREADS", "1")
        environment.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    first = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    first.start()
    first.join()


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 60.0, deadline: float = 120.0
) -> list[Any]:
    """Call a function on every rank, closures included, and return the results by rank; see `RankProcesses`."""
    __tracebackhide__ = True  # by pytest
    ranks = rank_processes(timeout, deadline)
    return [pickle.loads(result) for result in ranks.run(call, world_size, ByValue(function), ByValue(arguments))]


def rank_processes(timeout: float, deadline: float) -> RankProcesses:
    """Return processes that begin in the state of this test."""
    start_server()
    return RankProcesses(timeout=timeout, deadline=deadline, prepare=partial(prepare, os.getcwd(), warnings.filters))


def prepare(folder: str, filters: list[Any]) -> None:
    """Initialize the process of a rank."""
    os.chdir(folder)
    warnings.filters[:] = filters  # type: ignore[index]
    torch.default_generator.manual_seed(0)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class ByValue:
    """Is sent as its value, closures included."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, *arguments: Any) -> Any:
        return self.value(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (dumps(self.value),)


def call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Call a function, and return its result, which may be of a class of the tests."""
    return dumps(function(*arguments))


def dumps(value: Any) -> bytes:
    """Return the bytes for `pickle.loads`."""
    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


class Pickler(cloudpickle.Pickler):
    """Closures keep the globals of their modules and their lines in tracebacks, parameters their gradients."""

    dispatch_table: ClassVar = {
        **cloudpickle.Pickler.dispatch_table,
        CodeType: lambda code: (marshal.loads, (marshal.dumps(code),)),
    }

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_leaf and value.grad is not None:
            function, arguments, *state = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return with_gradient, (value.grad, function, arguments), *state
        reduced = super().reducer_override(value)
        if isinstance(value, FunctionType) and isinstance(reduced, tuple):
            module = value.__globals__.get("__name__")
            if value.__globals__ is getattr(sys.modules.get(module), "__dict__", None):
                _, (code, *_, closure), (attributes, slots), *others = reduced
                slots |= {"__globals__": {}, "_cloudpickle_submodules": []}
                return function_of, (module, code, closure), (attributes, slots), *others
        return reduced


def function_of(module: str, code: CodeType, closure: tuple[Any, ...] | None) -> FunctionType:
    """Rebuild a closure, whose state follows."""
    return FunctionType(code, vars(importlib.import_module(module)), None, None, closure)


def with_gradient(gradient: Tensor, function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
    """Rebuild a tensor, and give it its gradient."""
    tensor = function(*arguments)
    tensor.grad = gradient
    return tensor


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
