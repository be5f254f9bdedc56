"""The choice between kernels and ATen, and the memory that the operators cache."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from maxmoe import _library

_entered = threading.RLock()


@contextmanager
def force_aten(enabled: bool = True) -> Iterator[None]:
    """Context in which CPU tensors use the ATen implementation, which tensors on other devices always use.

    For tests, and to find out whether a kernel causes an error. Applies to all threads of the process.

    Args:
        enabled: whether to force ATen; False enables the kernels inside of an outer `force_aten`.

    Raises:
        RuntimeError: if another thread is in such a context, which would end it for both.
    """
    if not _entered.acquire(blocking=False):
        raise RuntimeError("force_aten applies to all threads of the process, and another thread is in its context")
    before = _library.force_aten(enabled)
    try:
        yield
    finally:
        _library.force_aten(before)
        _entered.release()


def empty_cache() -> None:
    """Return cached memory of the operators to the system, as `torch.cuda.empty_cache` does for a GPU.

    On Linux, freed CPU memory of results and work space of at least 4 MiB is cached for later calls. The cache is never
    larger than the peak use, and the system can reclaim it when it needs memory (`MADV_FREE`), so that it only shows in
    the resident memory of the process. On other systems, nothing is cached.
    """
    _library.empty_cache()
