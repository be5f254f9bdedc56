"""Every private name of torch that this package needs, and everything that depends on the release of torch.

Each function says what the name is for and what the public way would be; a lint rule refuses private names in any other
file. The tests run it with torch 2.13, 2.14 and 2.15.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import _register_namedtuple, tree_leaves, tree_map
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

# Documented in the notes of torch on extending it, but without a public module. torch.utils.pytree is to come.
__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map"]

_RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))

# Options of `torch.utils.checkpoint` for a selective checkpoint. The tensors that it keeps do not pass through
# saved-tensor hooks of the caller, such as save_on_cpu. Since torch 2.14 this is a choice, and torch warns under such
# hooks if nobody has chosen.
SELECTIVE_CHECKPOINT_OPTIONS: dict[str, bool] = {"respect_saved_tensors_hooks": False} if _RELEASE >= (2, 14) else {}


def register_namedtuple(kind: type[Any], name: str) -> None:
    """Give a named tuple the name under which `torch.export.save` writes it.

    Public: `torch.export.register_dataclass`, for dataclasses alone.
    """
    _register_namedtuple(kind, serialized_type_name=name)


def reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a contiguous tensor with another shape, which autograd does not take for a view.

    An in-place operator on a view replaces the autograd history of the view, and with it the hooks registered on it.
    Public: none; `torch.reshape` returns a view.
    """
    result: Tensor = torch.ops.aten._unsafe_view(tensor, shape)
    return result


def is_backward_running() -> bool:
    """Return whether this thread executes a backward pass.

    Public: none in Python.
    """
    return torch._C._current_graph_task_id() != -1


def selective_checkpoint_storage() -> object | None:
    """Return the storage that a forward under selective checkpointing and its recomputation share; None outside of one.

    The forward writes the tensors that its policy keeps there, and the recomputation reads them.
    Public: none.
    """
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode):
            storage: object = mode.storage
            return storage
    return None


def is_packed_by_checkpoint() -> bool:
    """Return whether `torch.utils.checkpoint` packs the tensors that autograd saves now: a non-reentrant checkpoint.

    Public: none; saved-tensor hooks can be set, not asked for.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


class WeakStorage:
    """A reference to the storage of a tensor that does not keep it alive.

    Public: none; `weakref` refers to one Python object, while autograd saves others that share the storage.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def get(self) -> torch.UntypedStorage | None:
        """Return the storage; None if no tensor shares it any more."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        return storage


def parameter_in_place(module: nn.Module, name: str) -> Tensor | None:
    """Return the parameter of a module, or the tensor that `put_in_place` has put there."""
    return module._parameters[name]


def put_in_place(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Let a module compute with a tensor in the place of one of its parameters.

    Public: `torch.nn.utils.stateless.functional_call`, which swaps the parameters for one call from outside; hooks are
    called inside of it. `setattr` accepts only an `nn.Parameter`, which is no part of a graph.
    """
    module._parameters[name] = tensor  # type: ignore[assignment]


class ConvertedModule(nn.Module):
    """A module that changes how `to`, `half` and their like convert its tensors.

    Public: none; `torch.nn.Module._apply` is where all of them end.
    """

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> "ConvertedModule":
        restore = self.before_conversion()
        super()._apply(function, recurse)  # type: ignore[no-untyped-call]
        restore()
        return self

    def before_conversion(self) -> Callable[[], None]:
        """Return the function that is called after the conversion."""
        raise NotImplementedError


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module does more than its forward.

    Public: none.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def default_store() -> Any:
    """Return the store of `init_process_group`.

    Public: none for the store that torchrun makes.
    """
    return dist.distributed_c10d._get_default_store()


def process_group_named(name: str) -> dist.ProcessGroup:
    """Return the process group with a name, which custom operators take in the place of a group.

    Public: none.
    """
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,attr-defined]
    return group


def argument_names(operator: Any) -> list[str]:
    """Return the names of the arguments of an operator, in order.

    Public: none.
    """
    return [argument.name for argument in operator._schema.arguments]


def waited(tensor: Tensor) -> Tensor:
    """Return the local tensor of a redistributed DTensor when its collective is complete.

    DTensor returns a tensor that waits at the first operator of torch. The C++ operators read its memory directly.
    Public: none; `torch.distributed` waits by handles, which DTensor does not return.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # with DTensor, slow to import

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def strided_shard(dim: int, split_factor: int) -> Any:
    """Return the placement of an axis that splits a dim after axes further inside on the mesh.

    Public: none; DTensor makes such placements by itself where FSDP2 shards a DTensor.
    """
    from torch.distributed.tensor.placement_types import _StridedShard  # with DTensor, slow to import

    return _StridedShard(dim, split_factor=split_factor)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor has been modified in place, as autograd counts it.

    Public: `Tensor._version` itself is documented, in "In-place correctness checks".
    """
    return tensor._version


def import_distributed() -> None:
    """Import what DTensor and FSDP2 import at their first use: before processes are forked, not in each of them.

    Public: the modules, but for `torch._dynamo`.
    """
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401
