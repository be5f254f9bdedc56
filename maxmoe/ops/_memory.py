"""The memory of results and work space."""

from maxmoe import _C


def empty_cache() -> None:
    """Give the memory that operators have freed back to the system, as `torch.cuda.empty_cache` does for a GPU.

    Results and work space of 4 MiB and more on the CPU lie in memory that is kept when it is freed, and used again.
    That is never more than was used at once, and the system may take it whenever it needs memory (`MADV_FREE`): it
    only shows in the resident memory of the process. Elsewhere than on Linux nothing is kept.
    """
    _C.empty_cache()
