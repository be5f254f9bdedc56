"""Tensors of the micro-batches of a pipeline that autograd and the engine hold, counted in each stage."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe.pipelining.stage import Stage


class Saved:
    """A tensor that autograd has saved; dies when autograd drops it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedByStages:
    """Counts of the saved tensors of one rank, at the end of each forward.

    Attributes:
        in_flight: by stage, the largest number of micro-batches with saved tensors.
        num_bytes: largest number of bytes of all saved tensors, with the outputs that wait for their gradients, without
            parameters.
    """

    def __init__(self, batch: tuple[Tensor, ...]) -> None:
        self.in_flight: Counter[int] = Counter()
        self.num_bytes = 0
        self._batch = {tensor.untyped_storage().data_ptr() for tensor in batch}
        self._saved: dict[tuple[int, int], weakref.WeakSet[Saved]] = defaultdict(weakref.WeakSet)
        self._outputs: list[weakref.ref[Tensor]] = []

    def count(self, stage: Stage, output: Tensor) -> None:
        """Count after a forward."""
        if not stage.is_last:
            self._outputs.append(weakref.ref(output))
        self.in_flight |= Counter(index for (index, _), saved in self._saved.items() if len(saved))
        tensors = [held.tensor for saved in self._saved.values() for held in saved]
        tensors += [tensor for tensor in (reference() for reference in self._outputs) if tensor is not None]
        self.num_bytes = max(self.num_bytes, sum(dict(map(self._memory, tensors)).values()))

    def _memory(self, tensor: Tensor) -> tuple[int, int]:
        """Address and bytes. Micro-batches are views of the batch: only their own part counts."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._batch:
            return tensor.data_ptr(), tensor.nbytes
        return storage.data_ptr(), storage.nbytes()

    @torch.no_grad()  # for to_local
    def pack(self, stage: Stage, number: int, modules: list[nn.Module], tensor: Tensor) -> Saved:
        saved = Saved(tensor.detach())  # a saved output would hold the graph that holds it
        # With FSDP2, the parameters are the gathered ones here.
        parameters = (p for module in modules for p in module._parameters.values() if p is not None)
        local = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
        if tensor.untyped_storage().data_ptr() not in {p.untyped_storage().data_ptr() for p in local}:
            self._saved[stage.index, number].add(saved)
        return saved


@contextmanager
def saved_by_stages(*batch: Tensor) -> Iterator[SavedByStages]:
    """Count in all stages of this rank; `batch` are the inputs and targets of the step."""
    counted, forward = SavedByStages(batch), Stage.forward

    def counting(stage: Stage, x: Tensor, micro_batch: Tensor) -> Tensor:
        number, modules = int(micro_batch), [*stage.modules()]
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: counted.pack(stage, number, modules, tensor), lambda saved: saved.tensor
        )
        with hooks:
            output = forward(stage, x, micro_batch)
        counted.count(stage, output)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "forward", counting)
        yield counted
