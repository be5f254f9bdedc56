"""Check that one thread at a time runs models on a mesh."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MESSAGE = (
    "models on a mesh must be called by one thread at a time, got calls of two: every rank would run their "
    "collectives in another order"
)


class OneThread:
    """Raises if a thread runs a model on a mesh while another thread does.

    Collectives pair in the order in which each rank starts them. Two threads start theirs in an order of their own on
    each rank, so that the ranks would wait for each other for ever, or get the values of another thread in silence.
    Which thread comes first differs between ranks, so that both threads get the error.
    """

    def __init__(self) -> None:
        self._changes = threading.Lock()
        self._thread: int | None = None
        self._depth = 0
        self._has_met_another = False

    def enter(self, thread: int | None = None) -> None:
        """Begin a forward or a backward.

        Args:
            thread: thread that has called the model, by its ident; None for this one. Autograd may run a backward in
                another one.
        """
        thread = threading.get_ident() if thread is None else thread
        with self._changes:
            if self._depth and thread != self._thread:
                self._has_met_another = True
                raise RuntimeError(MESSAGE)
            self._thread, self._depth = thread, self._depth + 1

    def check(self) -> None:
        """Raise if another thread has tried to begin since this one has begun."""
        if self._has_met_another:
            raise RuntimeError(MESSAGE)

    def leave(self) -> None:
        """End what `enter` has begun."""
        with self._changes:
            self._depth -= 1
            self._has_met_another &= self._depth > 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of a forward or a backward of this thread."""
        self.enter()
        try:
            yield
            self.check()
        finally:
            self.leave()


# Of the process, because models share process groups, the default group at least.
ONE_THREAD = OneThread()
