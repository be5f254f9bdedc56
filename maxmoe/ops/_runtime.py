"""The choice between kernels, CUDA kernels and ATen."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from maxmoe import _C

_entered = threading.RLock()


@contextmanager
def force_aten(enabled: bool = True) -> Iterator[None]:
    """Context in which all tensors use the ATen implementation, as tensors on devices without kernels always do.

    For tests, and to find out whether a kernel causes an error. Applies to all threads of the process.

    Args:
        enabled: whether to force ATen; False enables the kernels inside of an outer `force_aten`.

    Raises:
        RuntimeError: if another thread is in such a context, which would end it for both.
    """
    with _forced("force_aten", "aten" if enabled else "kernels"):
        yield


@contextmanager
def force_cuda_emulator() -> Iterator[None]:
    """Context in which CPU tensors run the CUDA kernels, in an emulator (``cpp/cuda/emulator.h``).

    For tests of these kernels without a GPU; far slower than the kernels of the CPU. What has no CUDA
    kernel goes through ATen, as on a GPU. Applies to all threads of the process. The emulator is built with the tests;
    wheels do not have it.

    Raises:
        RuntimeError: if the emulator has not been built, or if another thread is in such a context or in `force_aten`.
    """
    with _forced("force_cuda_emulator", "cuda_emulator"):
        yield


@contextmanager
def _forced(function: str, path: str) -> Iterator[None]:
    """Set the implementation for the time of the context; an error names the public function that was called."""
    if not _entered.acquire(blocking=False):
        raise RuntimeError(f"{function} applies to all threads of the process, and another thread is in its context")
    try:
        before = _C.force_path(path)
        try:
            yield
        finally:
            _C.force_path(before)
    finally:
        _entered.release()
