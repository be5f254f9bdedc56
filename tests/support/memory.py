"""Memory: what a block of code may allocate, and what autograd keeps."""

import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

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


@contextmanager
def saved_for_backward(given: Iterable[Tensor] = ()) -> Iterator[list[Tensor]]:
    """Collect what autograd keeps while the block runs, without the memory of given tensors."""
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory of tensors, some of which may share it."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
