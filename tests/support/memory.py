"""A bound on the memory that a block of code may allocate."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import maxmoe

MARGIN = 4 * 2**20  # for the interpreter and the allocator
# The C library maps each larger block separately and unmaps it when it is freed. Smaller blocks come from its heap,
# whose fragmentation decides whether freed memory can be reused, so that no bound holds for them.
SELF_CONTAINED = 2**25


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """Make the allocator fail if the process grows by more than `num_bytes`, up to a small margin.

    On one thread, since the stacks of others would count.
    """
    torch.set_num_threads(1)
    maxmoe.empty_cache()  # kept pages could be used without growth
    (kibibytes,) = re.findall(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(kibibytes) * 1024 + num_bytes + MARGIN, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
