"""What a step does, measured where torch dispatches its operators: collectives, saved tensors, memory and products."""

import math
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from maxmoe._torch import (
    PLAIN_TENSORS,
    TorchDispatchMode,
    argument_names,
    group_of_collective,
    id_of_storage,
    storage_id,
    tree_leaves,
)
from maxmoe._torch.autograd import is_backward_running
from maxmoe._torch.fsdp import gathered_parameters
from maxmoe.checks.whole_tensors import is_dtensor
from maxmoe.costs.fake_rank import tensors_in
from maxmoe.costs.flops import FLOPS
from maxmoe.parallel.apply.fsdp import fsdp_modules
from maxmoe.ranks.named_collectives import take_name
from maxmoe.sharding.mesh import Mesh

KINDS = {
    "all-gather": r"all_?gather",
    "reduce-scatter": r"reduce_scatter",
    "all-reduce": r"all_?reduce",
    "all-to-all": r"all_?to_?all",
    "broadcast": r"broadcast",
}
# Operators that read and write no memory.
ALLOCATIONS = re.compile(r"aten\.(new_)?empty|aten\._unsafe_view|c10d|fsdp\.")
# Purposes of the collectives of parameters.
GATHER, REDUCTION = "weights", "gradients of weights"


class Flow(NamedTuple):
    """A collective: what it communicates, and the bytes that a rank sends, and receives."""

    purpose: str
    kind: str
    axes: str
    num_bytes: int
    is_of_fsdp: bool = False  # of FSDP2, which names nothing; all other collectives of a step are named


class Work(NamedTuple):
    """Floating-point operations of an operator, and the bytes of its arguments and results."""

    flops: int
    num_bytes: int


@dataclass
class Measured:
    """Costs of a step, or of a part of one, on one rank.

    Args:
        flows: number of equal collectives.
        work: number of equal operators.
        saved: bytes that autograd keeps from the forward to the backward, without parameters and buffers.
        peak: most bytes in memory while the part runs, without parameters, gradients and buffers.
    """

    flows: Counter[Flow] = field(default_factory=Counter)
    work: Counter[Work] = field(default_factory=Counter)
    saved: int = 0
    peak: int = 0

    def add(self, other: "Measured", times: int = 1) -> None:
        """Add the costs of another part `times`; the peak is the larger one."""
        sums: list[tuple[Counter[Any], Counter[Any]]] = [(self.flows, other.flows), (self.work, other.work)]
        for mine, its in sums:
            for key, value in its.items():
                mine[key] += value * times
        self.saved += other.saved * times
        self.peak = max(self.peak, other.peak)

    @property
    def temporary(self) -> int:
        """Bytes in memory when most are, beside parameters, gradients, buffers and `saved`."""
        return max(0, self.peak - self.saved)


@contextmanager
def measuring(mesh: Mesh, model: nn.Module) -> Iterator["Recorder"]:
    """Measure the operators in the context; call `end_forward` of the recorder between forward and backward."""
    recorder, resize = Recorder(mesh, model), torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        recorder.resize(storage, size)
        return resize(storage, size)

    take_name()
    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
        saved_tensors_hooks(recorder.save, lambda tensor: tensor),
        recorder,
    ):
        yield recorder


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what operators do in `parts`: while a watched block runs, by its name, and by "" while none does."""

    def __init__(self, mesh: Mesh, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: defaultdict[str, Measured] = defaultdict(Measured)
        self._model = model
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._axes_of = cache(partial(_axes, mesh))
        # The tensors are kept, so that no other storage gets the id of one.
        self._stored = {storage_id(tensor): tensor for tensor in _stored_tensors(model)}
        self._sizes: dict[int, int] = {}  # bytes of all other storages
        self._live, self._block = 0, ""
        self._saved: dict[int, tuple[str, Tensor]] | None = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and measure it."""
        if (
            func is torch.ops.aten.add_.Tensor
            and all(map(is_dtensor, args))
            and args[0].placements == args[1].placements
        ):
            # The sum of gradients. On a mesh of six axes, torch searches for its placements for minutes.
            self.__torch_dispatch__(func, (), [part.to_local() for part in args], kwargs)
            return args[0]
        if not PLAIN_TENSORS.issuperset(types):
            return NotImplemented
        options = kwargs or {}
        if func is torch.ops.prim.device.default:  # asked once for every tensor of a list, and no memory traffic
            return args[0].fake_device
        result = func(*args, **options)
        results = tensors_in(result)
        for tensor in results:
            self._allocate(tensor)
        kind = _kind(func)
        if kind is not None:
            self._communicate(func, kind, args, result)
        elif _reads_or_writes(func):
            formula = FLOPS.get(func.overloadpacket)
            flops = 0 if formula is None else formula(*args, **options, out_val=result)
            num_bytes = sum(tensor.nbytes for tensor in (*tensors_in((args, options)), *results))
            self.parts[self._block].work[Work(flops, num_bytes)] += 1
        return result

    def save(self, tensor: Tensor) -> Tensor:
        """See a tensor that autograd saves; after the forward, it belongs to a recomputation."""
        if self._saved is not None and storage_id(tensor) not in self._stored:
            self._saved.setdefault(storage_id(tensor), (self._block, tensor))
        return tensor

    def end_forward(self) -> None:
        """Count what autograd has saved and still holds."""
        assert self._saved is not None
        # A schedule with a split backward keeps them gathered.
        for gathered in (tensor for block in fsdp_modules(self._model) for tensor in gathered_parameters(block)):
            self._saved.pop(storage_id(_local(gathered)), None)
        for block, tensor in self._saved.values():
            self.parts[block].saved += tensor.untyped_storage().nbytes()
        self._saved = None

    def watch(self, name: str, block: nn.Module) -> None:
        """Measure a block apart from all others."""

        def enter(_block: nn.Module, _arguments: Any) -> None:
            self._block = name
            self._see_live()

        def leave(_block: nn.Module, _arguments: Any, output: Any) -> None:
            self._block = ""
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    # The backward of the block begins with the gradient of an output. It ends where the backward of the
                    # block before begins; the backward of what comes before the first block counts for that block.
                    leaf.register_hook(lambda _gradient: setattr(self, "_block", name))  # type: ignore[no-untyped-call]

        # Around FSDP2, which gathers parameters in hooks of its own.
        block.register_forward_pre_hook(enter, prepend=True)
        block.register_forward_hook(leave, prepend=True)

    def _see_live(self) -> None:
        part = self.parts[self._block]
        part.peak = max(part.peak, self._live)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """See that a storage is about to get another size."""
        identity = id_of_storage(storage)
        if identity in self._sizes:
            self._live += size - self._sizes[identity]
            self._sizes[identity] = size
            self._see_live()

    def _allocate(self, tensor: Tensor) -> None:
        identity = storage_id(tensor)
        if identity not in self._sizes and identity not in self._stored:
            storage = tensor.untyped_storage()
            self._sizes[identity] = storage.nbytes()
            self._live += storage.nbytes()
            self._see_live()
            weakref.finalize(storage, self._free, identity)

    def _free(self, identity: int) -> None:
        self._live -= self._sizes.pop(identity)

    def _communicate(self, func: Any, kind: str, args: Sequence[Any], result: Any) -> None:
        leaves = tree_leaves((args, result))
        group = group_of_collective(leaves)
        num_bytes = _exchanged(func, args, group) if kind == "all-to-all" else _on_a_ring(kind, leaves, group.size())
        name, when = take_name(), "backward" if is_backward_running() else "forward"
        purpose = f"{self._purpose(name, kind)}, {when}"
        axes = self._axes_of(tuple(dist.get_process_group_ranks(group)))
        self.parts[self._block].flows[Flow(purpose, kind, axes, num_bytes, name is None)] += 1

    def _purpose(self, name: str | None, kind: str) -> str:
        """Return what a collective communicates, the same for all parameters."""
        if name is None:
            return GATHER if kind == "all-gather" else REDUCTION
        gradient = re.fullmatch(r"gradient of (.*?)( and \d+ others)?", name)
        if name.removesuffix(", again") in self._parameters:
            return GATHER
        return REDUCTION if gradient and gradient[1] in self._parameters else name


def _stored_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of this rank with their gradients, and the buffers."""
    for tensor in (*model.parameters(), *model.buffers()):
        for each in (tensor, tensor.grad):
            if each is not None:
                yield _local(each)


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank."""
    with torch.no_grad():
        part: Any = tensor
        local: Tensor = part.to_local() if is_dtensor(tensor) else tensor
        return local


def _axes(mesh: Mesh, ranks: Sequence[int]) -> str:
    """Return the axes of a mesh along which the ranks of a group differ."""
    places = [mesh.coordinates(rank) for rank in ranks]
    return ", ".join(axis for axis in mesh.axes if len({place[axis] for place in places}) > 1)


@cache
def _kind(func: Any) -> str | None:
    """Return the kind of a collective, None for any other operator."""
    name = str(func)
    if not name.startswith(("c10d", "_c10d", "maxmoe_dispatch")):
        return None
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), None)


@cache
def _reads_or_writes(func: Any) -> bool:
    """Return whether an operator reads or writes memory."""
    return not func.is_view and not ALLOCATIONS.match(str(func))


def _on_a_ring(kind: str, leaves: Sequence[Any], num_ranks: int) -> int:
    """Return (n - 1) / n of the largest tensor, the bytes that a rank of a ring sends; twice that for an all-reduce."""
    largest = max(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return (2 if kind == "all-reduce" else 1) * largest * (num_ranks - 1) // num_ranks


def _exchanged(func: Any, args: Sequence[Any], group: dist.ProcessGroup) -> int:
    """Return the bytes of an all-to-all that this rank sends to others, or receives, whichever are more."""
    given = dict(zip(argument_names(func), args, strict=False))
    tensor, most = given["input"], 0
    for splits in (given["input_split_sizes"], given["output_split_sizes"]):
        counts = splits or [len(tensor) // group.size()] * group.size()
        most = max(most, sum(counts) - counts[group.rank()])
    return int(most * math.prod(tensor.shape[1:]) * tensor.itemsize)
