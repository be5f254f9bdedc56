"""Memory that is freed between forward and backward under the tensors that autograd has saved."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from maxmoe.nn.recompute import checkpointed_call, is_recomputation


class FreedStorage:
    """The storage of a tensor, freed between forward and backward.

    Autograd may have saved tensors that share it: it is emptied under them, and must be filled before the backward
    reads them. Where nothing was saved, the storage is gone when the forward ends, and is not needed again. This needs
    no saved-tensor hooks, and operators that save their arguments in C++ are covered as well. FSDP2 does the same with
    its unsharded parameters.

    Args:
        tensor: nothing else may need its storage.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage_reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._num_bytes = storage.nbytes()
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._is_freed = False

    def free(self) -> None:
        """Free the storage."""
        storage = self._storage()
        if storage is not None:
            storage.resize_(0)
            self._is_freed = True

    @property
    def is_needed(self) -> bool:
        """Whether the storage is freed, and tensors share it still. On all ranks alike, empty tensors included."""
        return self._is_freed and self._storage() is not None

    @torch.no_grad()
    def fill(self, values: Tensor) -> None:
        """Allocate the storage again.

        Args:
            values: of the tensor.
        """
        storage = self._storage()
        assert storage is not None
        storage.resize_(self._num_bytes)
        values.new_empty(0).set_(storage, *self._view).copy_(values)
        self._is_freed = False

    def _storage(self) -> torch.UntypedStorage | None:
        """Return the storage, None if no tensor shares it any more."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._storage_reference.cdata)
        return storage


class Recomputation(NamedTuple):
    """A tensor, and how the same values are brought again.

    Attributes:
        tensor: that nothing but autograd needs after the forward.
        start: begins to bring them; what it returns waits for them.
    """

    tensor: Tensor
    start: Callable[[], Callable[[], Tensor]]


class Recomputed:
    """Tensors that are freed until the backward, and computed again in it, in their order.

    Where activation checkpointing runs around them nothing is freed: in the forward autograd does not keep them, and
    in the recomputation the backward follows at once. `torch.compile` decides by itself what it keeps.

    Args:
        recomputations: of the tensors; each may need those before it.
        outputs: of the operators that have saved them, and are done.
    """

    def __init__(self, recomputations: Sequence[Recomputation], outputs: Tensor) -> None:
        self._waiting = [(FreedStorage(tensor), start) for tensor, start in recomputations if self._frees(outputs)]
        self._started: list[tuple[FreedStorage, Callable[[], Tensor]]] = []
        for storage, _ in self._waiting:
            storage.free()
        if self._waiting:
            outputs.register_hook(self._finish)  # type: ignore[no-untyped-call]

    def start_before_backward_of(self, result: Tensor) -> None:
        """Start when the backward reaches a tensor, ahead of the outputs: the gradient travels at the same time.

        Args:
            result: what the outputs have become.
        """
        if self._waiting:
            result.register_hook(self._start)  # type: ignore[no-untyped-call]

    @staticmethod
    def _frees(outputs: Tensor) -> bool:
        is_checkpointed = is_recomputation() or checkpointed_call() is not None
        return outputs.requires_grad and not is_checkpointed and not torch.compiler.is_compiling()

    @torch.no_grad()
    def _start(self, _gradient: Tensor) -> None:
        waiting, self._waiting = self._waiting, []
        self._started += [(storage, start()) for storage, start in waiting if storage.is_needed]

    @torch.no_grad()
    def _finish(self, gradient: Tensor) -> None:
        self._start(gradient)
        started, self._started = self._started, []
        for storage, wait in started:
            storage.fill(wait())
