"""Cache of the memory of results and work space."""

from maxmoe import _C


def empty_cache() -> None:
    """Return cached memory of the operators to the system, as `torch.cuda.empty_cache` does for a GPU.

    On Linux, freed CPU memory of results and work space of at least 4 MiB is cached for later calls. The cache is never
    larger than the peak use, and the system can reclaim it when it needs memory (`MADV_FREE`), so that it only shows in
    the resident memory of the process. On other systems, nothing is cached.
    """
    _C.empty_cache()
