"""Frees the storage of saved tensors after the forward pass and refills it before the backward pass."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from maxmoe._torch import WeakStorage
from maxmoe.recompute.selective import is_checkpointed


class FreedStorage:
    """Storage of a tensor that is freed between forward and backward.

    Autograd may have saved tensors that share the storage. They stay alive with an empty storage, which must be filled
    before the backward reads them. If nothing was saved, the storage is deallocated with the tensor and need not be
    filled. Unlike saved-tensor hooks, this includes tensors that operators save in C++. FSDP2 does the same with its
    unsharded parameters. No other tensor may use the storage after `free`.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = WeakStorage(tensor)
        self._num_bytes = storage.nbytes()
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._is_freed = False

    def free(self) -> None:
        """Resize the storage to zero bytes, if it exists still."""
        storage = self._storage.get()
        if storage is not None:
            storage.resize_(0)
            self._is_freed = True

    @torch.no_grad()
    def fill(self, values: Tensor) -> Tensor:
        """Return `values`, in the storage if it is freed and tensors still share it: it is then allocated again."""
        storage = self._storage.get()
        if storage is None or not self._is_freed:
            return values
        storage.resize_(self._num_bytes)
        self._is_freed = False
        return values.new_empty(0).set_(storage, *self._view).copy_(values)


# Function that waits for a tensor or computes it, and returns it.
Wait: TypeAlias = Callable[[], Tensor]


class Recomputation(NamedTuple):
    """A tensor that only autograd reads after the forward, and the function that starts its recomputation.

    `start` gets a function that returns the previous tensor, and returns a function that waits for the result.
    """

    tensor: Tensor
    start: Callable[[Wait], Wait]


class Rematerialized:
    """Tensors that are freed after the forward and recomputed in the backward, each from the previous one.

    All freed tensors are recomputed, even if autograd has not saved them. A recomputation may start collectives, so all
    ranks must run the same ones. Whether a storage is in use may differ between ranks, because the thread of a
    collective may hold a tensor for longer on one rank than on another. It decides only whether the storage is filled.

    Under activation checkpointing, nothing is freed: its forward saves none of the tensors, and its recomputation is
    followed by the backward at once. `torch.compile` decides itself which tensors it saves.

    Args:
        x: tensor from which the first tensor is recomputed.
        recomputations: recomputations of the tensors, in order.
        outputs: outputs of the operators that saved the tensors; the backward of `outputs` waits for the recomputation.
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
        """Start the recomputation when the backward reaches `result`, a tensor computed from the outputs.

        The collectives of the recomputation then overlap with the communication of the gradient from `result` to the
        outputs.
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
    """Start all recomputations; return a function that waits, fills the storages and returns the last tensor."""

    def filled(storage: FreedStorage, wait: Wait) -> Tensor:
        return storage.fill(wait())

    def last() -> Tensor:
        return x

    for storage, start in freed:
        last = partial(filled, storage, start(last))
    return last
