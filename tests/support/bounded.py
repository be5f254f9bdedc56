"""A test that hangs fails after a bound, where it waits, with the stacks of all processes that it has started."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from support.programs import Hangs, abort, add_mark

MAX_SECONDS = 600.0  # longer than any program and any ranks may take, whose errors say more

_mark = add_mark(os.environ)


@contextmanager
def bounded(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Raise an error in this thread after some seconds.

    Where the thread is in C++ and returns to Python no more, pytest ends later, with its stacks: `faulthandler_timeout`
    in pyproject.toml.
    """

    def stop(*_: Any) -> NoReturn:
        abort(_mark)
        raise Hangs(f"still running after {seconds:g} s; what it has started is aborted, see its stderr")

    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
