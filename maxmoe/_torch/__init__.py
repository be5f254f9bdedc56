"""Every private name of torch that this package uses, and everything that depends on the release of torch.

The files are named after the parts of torch whose private names they hold; names of other parts are here. A test
refuses private names in any other package. Where torch has a public alternative, the docstring says why it is not
used. The tests run it with torch 2.13, 2.14 and 2.15.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import _register_namedtuple, tree_leaves, tree_map

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Documented in the notes of torch on extending it, but not in a public module.
__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "tree_leaves", "tree_map"]

# Types of tensors without operators of their own. A subclass such as DTensor first runs its operators.
PLAIN_TENSORS = frozenset({Tensor, nn.Parameter, FakeTensor})

_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
_KINDS_OF_HOOKS = ("always_called", "with_kwargs")

Function = TypeVar("Function", bound=Callable[..., Any])

_RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))

# Options of `torch.utils.checkpoint` for a selective checkpoint. The tensors that it keeps do not pass through
# saved-tensor hooks of the caller, such as save_on_cpu. Since torch 2.14 this is a choice, and torch warns under such
# hooks if nobody has chosen.
SELECTIVE_CHECKPOINT_OPTIONS: dict[str, bool] = {"respect_saved_tensors_hooks": False} if _RELEASE >= (2, 14) else {}

# Attention on the CPU, whose floating-point operations torch.utils.flop_counter leaves out.
attention_of_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# torch has renamed these two. Older releases lack the first name, newer ones warn of the second.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def register_namedtuple(kind: type[Any], name: str) -> None:
    """Register the name of a named tuple for `torch.export.save`; public for dataclasses only."""
    _register_namedtuple(kind, serialized_type_name=name)


def assert_async(condition: Tensor, message: str) -> None:
    """Raise unless `condition` is true, on an accelerator without waiting for it. `torch._check` needs the value."""
    torch._assert_async(condition, message)


def reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a contiguous tensor with another shape, which is not a view for autograd, unlike with `torch.reshape`.

    An in-place operator on a view replaces the autograd history of the view, and with it the hooks registered on it.
    """
    result: Tensor = torch.ops.aten._unsafe_view(tensor, shape)
    return result


def never_compiled(function: Function) -> Function:
    """Keep `torch.compile` from tracing a function, because it communicates or its shapes depend on what it receives.

    `torch.compile` breaks the graph at the call and runs the function in eager mode, so that another number of rows
    from other ranks causes no recompilation. `torch.compiler.disable` imports the compiler at once.
    """
    return cast(Function, _disable_dynamo(function))


def called_uncompiled(function: Function) -> Function:
    """Keep `torch.compile` from tracing a function itself; it compiles what the function calls."""
    return cast(Function, _disable_dynamo(function, recursive=False))


def is_traced() -> bool:
    """Return whether a compiler records the operators that run now; `torch.jit.is_tracing` is deprecated."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


class WeakStorage:
    """Weak reference to the storage of a tensor.

    `weakref` refers to one Python object, while autograd saves others that share the storage.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def get(self) -> torch.UntypedStorage | None:
        """Return the storage; None if it has been freed."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        return storage


def storage_id(tensor: Tensor) -> int:
    """Return the id of a storage, unique while the storage lives. Fake tensors have one, but no data pointer."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def id_of_storage(storage: torch.UntypedStorage) -> int:
    """Return the id of a storage, as `storage_id` of a tensor that has it."""
    identity: int = storage._cdata
    return identity


def group_of_collective(leaves: Sequence[Any]) -> dist.ProcessGroup:
    """Return the group among the arguments of a collective. Functional ones have its name, others the group itself."""
    for leaf in leaves:
        if isinstance(leaf, str) and leaf not in ("sum", "avg"):
            return process_group_named(leaf)
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf)
    raise AssertionError("a collective without a group")


def base_of_view(tensor: Tensor) -> Tensor | None:
    """Return the base of a view, None for other tensors. Modifying a view in place changes the history of its base."""
    base: Tensor | None = tensor._base
    return base


def parameter_table(module: nn.Module) -> dict[str, Any]:
    """Return the parameters of a module itself by name, in which a tensor may take the place of one.

    The public `torch.func.functional_call` replaces parameters for one call from outside, but hooks run inside of a
    call. `setattr` accepts only an `nn.Parameter`, which is a leaf of the autograd graph.
    """
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, Any]:
    """Return the buffers of a module itself by name, in less time than an attribute takes."""
    return module._buffers


def child_table(module: nn.Module) -> dict[str, Any]:
    """Return the modules in a module by name, in less time than an attribute takes."""
    return module._modules


def as_parameter(tensor: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """Make a tensor without autograd history a parameter, and return it.

    `nn.Parameter` detaches the tensor. For a DTensor, the first detach of each shape takes a millisecond.
    """
    tensor._is_param = True
    tensor.requires_grad_(requires_grad)
    assert isinstance(tensor, nn.Parameter)
    return tensor


class ConvertedModule(nn.Module):
    """Module with hooks around conversions by `to`, `half` and similar methods, which all call `Module._apply`."""

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> "ConvertedModule":
        restore = self.before_conversion()
        super()._apply(self.conversion(function), recurse)  # type: ignore[no-untyped-call]
        restore()
        return self

    def before_conversion(self) -> Callable[[], None]:
        """Prepare the conversion, and return a function to call after it."""
        return lambda: None

    def conversion(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return the function that converts each tensor, given the function that torch passes to `Module._apply`."""
        return function


def has_pre_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Return whether a forward pre-hook is registered at a module."""
    return hook in module._forward_pre_hooks.values()


def entries_of_hooks(*modules: nn.Module) -> tuple[tuple[dict[str, Any], str], ...]:
    """Return the table and the name of what makes a call of a module more than the forward of its class, where true."""
    own = ("forward", "_compiled_call_impl", *(f"_{kind}" for kind in _HOOKS))
    of_all = (*(f"_global_{kind}" for kind in _HOOKS), *(f"_global_forward_hooks_{kind}" for kind in _KINDS_OF_HOOKS))
    table_of_all = vars(nn.modules.module)
    return (*((vars(module), name) for module in modules for name in own), *((table_of_all, name) for name in of_all))


def are_called_plainly(*modules: nn.Module) -> bool:
    """Return whether a call of any of the modules runs the forward of its class and nothing else, such as a hook."""
    return not any(table.get(name) for table, name in entries_of_hooks(*modules))


def default_store() -> Any:
    """Return the store of `init_process_group`, also if torchrun made it."""
    return dist.distributed_c10d._get_default_store()


def process_group_named(name: str) -> dist.ProcessGroup:
    """Return the process group with a name, which custom operators take instead of a group."""
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return group


def has_other_owner(tensor: Tensor) -> bool:
    """Return whether other Python or C++ objects than the caller's own refer to a tensor."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count > 1


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same elements in the same memory, also tensors without memory."""
    one, two = ((storage_id(each), each.shape, each.stride(), each.storage_offset()) for each in (tensor, other))
    return one == two


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Run operators without the dispatch modes around them, as a mode must to compute a part of them itself."""
    with _disable_current_modes():
        yield


@contextmanager
def shapes_apart_from_modes() -> Iterator[None]:
    """Let DTensor find out the shapes of results without the dispatch modes around it, which would see global tensors.

    It runs operators on fake tensors under a lock of its class, which this context replaces.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator  # with DTensor, slow to import

    class Apart:
        def __enter__(self) -> None:
            self.modes = without_dispatch_modes()
            self.modes.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.modes.__exit__(*error)

    with mock.patch.object(ShardingPropagator, "_fake_mode_lock", Apart()):
        yield


@contextmanager
def without_log_of_fake_tensors() -> Iterator[None]:
    """Keep torch from logging a traceback of each operator that fails on fake tensors: the caller reports the error."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def argument_names(operator: Any) -> list[str]:
    """Return the names of the arguments of an operator, in order."""
    return [argument.name for argument in operator._schema.arguments]


def strided_shard(dim: int, split_factor: int) -> Any:
    """Return the placement of a mesh axis that shards a dim after later axes of the mesh have sharded it."""
    from torch.distributed.tensor.placement_types import _StridedShard  # with DTensor, slow to import

    return _StridedShard(dim, split_factor=split_factor)


def root_mesh(mesh: "DeviceMesh") -> "DeviceMesh":
    """Return the mesh of which a mesh is a part, or the mesh itself."""
    return mesh._get_root_mesh()


def schedule_actions(
    make: Callable[..., Any], stages: Sequence[int], num_ranks: int, num_micro_batches: int
) -> list[list[tuple[str, int, int]]]:
    """Return letter, stage and micro-batch of each computation on each rank, in the order of a schedule of torch.

    The letters are torch's: F for a forward, B for a backward, I and W for the gradients of inputs and of weights. The
    order is an undocumented attribute of the schedules, which they compute without process groups. `make` is a class of
    a schedule with several stages per rank, `stages` are the stages of the first rank.
    """
    sizes = {"num_stages": num_ranks * len(stages), "group_size": num_ranks, "group_rank": 0, "submod": nn.Identity()}
    schedule = make([SimpleNamespace(stage_index=stage, **sizes) for stage in stages], num_micro_batches)
    ranks = []
    for _, actions in sorted(schedule.pipeline_order.items()):
        # An idle step is None. A forward that overlaps with a backward is one action with two parts.
        parts = [part for action in actions if action is not None for part in action.sub_actions or (action,)]
        ranks.append([(part.computation_type.value, part.stage_index, part.microbatch_index) for part in parts])
    return ranks


def version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor, which autograd increments with every in-place operation."""
    return tensor._version


def local_version_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor, of a DTensor the counter of its local tensor, without a view of it."""
    return version_of(getattr(tensor, "_local_tensor", tensor))


def process_groups() -> dict[str, list[int]]:
    """Return the ranks of each process group of this process by description; torch lists the groups nowhere.

    The description is "mesh_<axis>" for the axis of a `DeviceMesh`. Groups without one are numbered.
    """
    groups: dict[str, list[int]] = {}
    for group in dist.distributed_c10d._world.pg_map:
        name = group.group_desc if group.group_desc not in ("", "undefined") else f"group_{len(groups)}"
        groups.setdefault(name, dist.get_process_group_ranks(group))
    return groups
