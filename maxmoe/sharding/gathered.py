"""A gathered parameter that gives its memory back between forward and backward."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Gathered:
    """The memory of a gathered parameter, which autograd may have saved for the backward.

    What autograd saves are tensors and views that share this memory: it can be emptied under them, and must be filled
    again before the backward comes to them. If nothing was saved, the memory is gone, and stays so.

    Args:
        tensor: the gathered parameter; nobody else needs its memory.
        gather: makes the same tensor again.
    """

    def __init__(self, tensor: Tensor, gather: Callable[[], Tensor]) -> None:
        storage = tensor.untyped_storage()
        self._memory = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._num_bytes = storage.nbytes()
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._gather = gather

    def release(self) -> None:
        """Give the memory back."""
        storage = self._storage()
        if storage is not None:
            storage.resize_(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Gather once more, if the memory is needed and empty."""
        storage = self._storage()
        if storage is None or storage.nbytes() == self._num_bytes:
            return
        fresh = self._gather()
        storage.resize_(self._num_bytes)
        fresh.new_empty(0).set_(storage, *self._view).copy_(fresh)

    def _storage(self) -> torch.UntypedStorage | None:
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        return storage


def in_backward() -> bool:
    """Whether a backward is running: a forward in it is a recomputation."""
    return torch._C._current_graph_task_id() != -1
