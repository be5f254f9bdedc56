"""Values that a caller sets for the modules that it calls, separately in each thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from maxmoe._torch import never_compiled
from maxmoe._torch.autograd import is_backward_running, running_checkpoints
from maxmoe._torch.forward_values import keep_for_recomputations, kept_values

Value = TypeVar("Value")


class OfThisThread(threading.local, Generic[Value]):
    """A value that each thread sets for the time of a block, for the modules that it calls; None outside of one.

    Unlike an attribute of a module, other threads do not see it. `torch.compile` traces and guards it, so that compiled
    code sees the value of the thread that calls it; a `contextvars.ContextVar` cannot be traced. The backward on an
    accelerator, with its recomputations, runs in a thread of autograd, in which it is None: a module that can be
    recomputed calls `read`.

    Args:
        name: name of the value for messages; it must be unique, because modules that have read the value are marked
            with it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._value: Value | None = None
        self._is_set_in: tuple[object, ...] = ()  # checkpoints

    @property
    def value(self) -> Value | None:
        """Value of the block that runs now."""
        return self._value

    @value.setter
    def value(self, value: Value | None) -> None:
        self._value = value
        self._is_set_in = () if value is None or torch.compiler.is_compiling() else (*running_checkpoints(),)

    @contextmanager
    def set(self, value: Value) -> Iterator[None]:
        """Set the value while the block runs."""
        before = self._value, self._is_set_in
        self.value = value
        try:
            yield
        finally:
            self._value, self._is_set_in = before

    def read(self, module: Any, purpose: str = "") -> Value | None:
        """Return the value in a call of a module; where the module is recomputed alone, the value of its forward.

        A module that reads the value in two places, between which it may change, has a purpose for each.

        Raises:
            RuntimeError: in a recomputation of a module that has read values, if the value of its forward is not known:
                of compiled code, or by something else than a checkpoint.
        """
        value, mark, reader = self._value, f"has_read {self._name} {purpose}", (self, module, purpose)
        # hasattr takes microseconds for what a module has not, but can be traced.
        if not (hasattr(module, mark) if torch.compiler.is_compiling() else mark in vars(module)):
            if value is None:
                return None
            setattr(module, mark, True)
        if torch.compiler.is_compiling():
            if value is None and torch.is_grad_enabled():
                _refuse_recomputation(module, self._name)  # which breaks the graph
            return value
        if value is None and is_backward_running():
            kept = kept_values(reader)
            if not kept:
                _refuse_recomputation(module, self._name)
            value = kept[0]
        keep_for_recomputations(reader, value, is_set_in=self._is_set_in)
        return value

    def __reduce__(self) -> Any:
        """Copy and pickle it without a value, with the module that has it."""
        return type(self), (self._name,)


@never_compiled
def _refuse_recomputation(module: Any, name: str) -> None:
    """Raise in a recomputation."""
    if is_backward_running():
        raise RuntimeError(
            f"{type(module).__name__} is recomputed alone, without the {name} that its caller had set for its forward: "
            "checkpoint the layer around it, or this module uncompiled, with torch.utils.checkpoint"
        )
