"""Memory that is freed between forward and backward under the tensors that autograd has saved."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from maxmoe._torch import WeakStorage
from maxmoe.recompute.selective import is_checkpointed


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
        self._storage = WeakStorage(tensor)
        self._num_bytes = storage.nbytes()
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._is_freed = False

    def free(self) -> None:
        """Free the storage."""
        storage = self._storage.get()
        if storage is not None:
            storage.resize_(0)
            self._is_freed = True

    @property
    def is_needed(self) -> bool:
        """Whether the storage is freed, and tensors share it still. On all ranks alike, empty tensors included."""
        return self._is_freed and self._storage.get() is not None

    @torch.no_grad()
    def fill(self, values: Tensor) -> Tensor:
        """Allocate the storage again. It must be needed.

        Args:
            values: of the tensor.

        Returns:
            The tensor, without a graph.
        """
        storage = self._storage.get()
        assert storage is not None
        storage.resize_(self._num_bytes)
        self._is_freed = False
        return values.new_empty(0).set_(storage, *self._view).copy_(values)


# Waits for a tensor, or computes it.
Wait: TypeAlias = Callable[[], Tensor]


class Recomputation(NamedTuple):
    """A tensor and the function that recomputes it.

    Attributes:
        tensor: read by nothing but autograd after the forward.
        start: starts to recompute it, given the tensor before it; returns a function that waits for the result.
    """

    tensor: Tensor
    start: Callable[[Wait], Wait]


class Rematerialized:
    """Tensors that are freed after the forward and recomputed once in the backward, each from the one before it.

    What was freed is recomputed even if autograd has not saved it. Recomputing may start collectives, so it must not
    depend on which storages are in use: the thread of a collective may hold a tensor longer on one rank than on
    another. Only whether a storage is filled depends on it.

    Nothing is freed in activation checkpointing, see `is_checkpointed`: in its forward autograd keeps none of the
    tensors, and in the recomputation the backward follows at once. `torch.compile` decides by itself what it keeps.

    Args:
        x: from which the first tensor is recomputed.
        recomputations: of the tensors, in order.
        outputs: of the operators that have saved the tensors.
    """

    def __init__(self, x: Tensor, recomputations: Sequence[Recomputation], outputs: Tensor) -> None:
        self._start_all: Callable[[], Wait] | None = None
        self._wait_for_all: Wait | None = None
        is_kept = outputs.requires_grad and not torch.compiler.is_compiling() and not is_checkpointed()
        if not recomputations or not is_kept:
            return
        freed = [(FreedStorage(tensor), start) for tensor, start in recomputations]
        for storage, _ in freed:
            storage.free()
        self._start_all = lambda: _start_all(x, freed)
        outputs.register_hook(self._finish)  # type: ignore[no-untyped-call]

    def start_before_backward_of(self, result: Tensor) -> None:
        """Start when the backward reaches a tensor, ahead of the outputs: the gradient travels at the same time.

        Args:
            result: what the outputs have become.
        """
        if self._start_all is not None:
            result.register_hook(self._start)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _start(self, _gradient: Tensor) -> None:
        start, self._start_all = self._start_all, None
        if start is not None:
            self._wait_for_all = start()

    @torch.no_grad()
    def _finish(self, gradient: Tensor) -> None:
        self._start(gradient)
        wait, self._wait_for_all = self._wait_for_all, None
        if wait is not None:
            wait()


def _start_all(x: Tensor, freed: Sequence[tuple[FreedStorage, Callable[[Wait], Wait]]]) -> Wait:
    """Start to recompute tensors; return a function that waits for them, fills their storages and returns the last."""

    def filled(storage: FreedStorage, wait: Wait) -> Wait:
        def fill() -> Tensor:
            values = wait()
            return storage.fill(values) if storage.is_needed else values

        return fill

    def last() -> Tensor:
        return x

    for storage, start in freed:
        last = filled(storage, start(last))
    return last
