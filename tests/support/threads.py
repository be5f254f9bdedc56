"""Functions that run at the same time, each in its own thread."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Call each function in a thread, all at once, and return their results; raises the first error of any."""
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        barrier.wait()
        return function()

    with frequent_switches(), ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Let Python switch threads after ten microseconds: it then runs few operators of one thread after each other."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
