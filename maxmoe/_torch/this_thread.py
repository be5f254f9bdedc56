"""Values that a caller sets for the modules that it calls, separately in each thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class OfThisThread(threading.local, Generic[Value]):
    """A value that each thread sets for the time of a block, for the modules that it calls; None outside of one.

    Unlike an attribute of a module, other threads do not see it. `torch.compile` traces and guards it, so that compiled
    code sees the value of the thread that calls it; a `contextvars.ContextVar` cannot be traced. The backward on an
    accelerator, with its recomputations, runs in a thread of autograd, in which it is None.
    """

    def __init__(self) -> None:
        self.value: Value | None = None

    @contextmanager
    def set(self, value: Value) -> Iterator[None]:
        """Set the value while the block runs."""
        before = self.value
        self.value = value
        try:
            yield
        finally:
            self.value = before

    def __reduce__(self) -> Any:
        """Copy and pickle it without a value, with the module that has it."""
        return type(self), ()
