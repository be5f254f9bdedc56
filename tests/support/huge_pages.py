"""Memory of this process in huge pages, so that a fork copies a few page tables."""

import ctypes
from contextlib import suppress
from pathlib import Path

MADV_COLLAPSE = 25  # since Linux 6.1; an older one refuses, and a fork takes as long as before


def use_huge_pages() -> None:
    """Move the memory that there is now into huge pages, as far as possible."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines() if madvise else ():
            addresses, mode, _, _, file, *name = line.split(maxsplit=5)
            if mode == "rw-p" and file == "0" and name in ([], ["[heap]"]):
                begin, end = (int(address, 16) for address in addresses.split("-"))
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)
