"""The switch between the kernels and ATen."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from maxmoe import _C

# As in C++, where torch.compile cannot read it.
_is_forced = False


@contextmanager
def force_aten(enabled: bool = True) -> Iterator[None]:
    """Send CPU tensors, too, through the ATen implementation that other devices use.

    For tests, and to tell whether a kernel is at fault. Holds for all threads of the process.

    Args:
        enabled: False turns the kernels back on inside of an enclosing `force_aten`.

    Yields:
        Nothing.
    """
    before = _is_forced
    _set_forced(enabled)
    try:
        yield
    finally:
        _set_forced(before)


def uses_kernels(tensor: Tensor) -> bool:
    """Return whether the operators compute it with the kernels, and not through ATen.

    Args:
        tensor: any.

    Returns:
        As `uses_kernels` of C++.
    """
    return tensor.device.type == "cpu" and not _is_forced


def _set_forced(forced: bool) -> None:
    global _is_forced
    _C.force_aten(forced)
    _is_forced = forced
