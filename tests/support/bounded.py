"""A test that hangs fails after a bound, at the line that waits, with the stacks of its processes."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from support.programs import HangError, abort, add_mark

MAX_SECONDS = 600.0  # above the bounds of programs and ranks, whose errors say more

_mark = add_mark(os.environ)


@contextmanager
def bounded(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Raise an error in this thread after some seconds.

    The error cannot interrupt C++. If the thread never returns to Python, pytest ends with its stacks some minutes
    later, see `faulthandler_timeout` in pyproject.toml.
    """

    def stop(*_: Any) -> NoReturn:
        abort(_mark)
        raise HangError(f"the test is still running after {seconds:g} s; its processes wrote their stacks to stderr")

    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
