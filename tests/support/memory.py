"""A bound on the memory that a piece of code may ask for."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import maxmoe

MARGIN = 4 * 2**20  # of the interpreter and the allocator
# The C library maps what is larger by itself and gives it back at once. What is smaller comes from its heap,
# where one small neighbour decides whether a freed tensor's room fits the next: no bound holds for those.
SELF_CONTAINED = 2**25


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """Fail with an error of the allocator where the process grows by more, a little margin apart.

    On one thread, since the stacks of others would count.
    """
    torch.set_num_threads(1)
    maxmoe.empty_cache()  # what it keeps would be used beside the bound
    (kibibytes,) = re.findall(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(kibibytes) * 1024 + num_bytes + MARGIN, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
