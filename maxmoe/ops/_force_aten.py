"""Switch between the kernels and the ATen implementation."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from maxmoe import _C

# Copy of the flag in C++, which torch.compile cannot read.
_is_forced = False


@contextmanager
def force_aten(enabled: bool = True) -> Iterator[None]:
    """Context in which CPU tensors use the ATen implementation, which tensors on other devices always use.

    For tests, and to find out whether a kernel causes an error. Applies to all threads of the process.

    Args:
        enabled: whether to force ATen; False enables the kernels inside of an outer `force_aten`.

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
    """Return whether operators compute this tensor with the kernels, not through ATen; as `uses_kernels` in C++."""
    return tensor.device.type == "cpu" and not _is_forced


def _set_forced(forced: bool) -> None:
    global _is_forced
    _C.force_aten(forced)
    _is_forced = forced
