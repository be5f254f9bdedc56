"""The switch between the kernels and ATen."""

from collections.abc import Iterator
from contextlib import contextmanager

from maxmoe import _C


@contextmanager
def force_aten(enabled: bool = True) -> Iterator[None]:
    """Send CPU tensors, too, through the ATen implementation that other devices use.

    For tests, and to tell whether a kernel is at fault. Holds for all threads of the process.

    Args:
        enabled: False turns the kernels back on inside of an enclosing `force_aten`.

    Yields:
        Nothing.
    """
    before = _C.force_aten(enabled)
    try:
        yield
    finally:
        _C.force_aten(before)
