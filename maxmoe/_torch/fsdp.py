"""Private names of FSDP2: groups of parameters and their hooks, the root, what an exception leaves in it."""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def shard_axes(device_mesh: DeviceMesh, shard: str, replicate: tuple[str, ...], group: dist.ProcessGroup | None) -> Any:
    """Return the axes over which FSDP2 shards parameters, and over which it all-reduces the shards of their gradients.

    `fully_shard` makes this object from the names of the axes, but one for all parameters of a module, and for several
    axes a flattened mesh, which `Mesh.process_group` avoids. `replicate` are axes in the order of the mesh, and `group`
    has the ranks along them.
    """
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    options: dict[str, Any] = {
        "dp_mesh_dims": DataParallelMeshDims(shard=shard, replicate=replicate or None),
        "spmd_mesh": device_mesh,
    }
    if group is None:
        return FSDPMeshInfo(device_mesh[shard], shard_mesh_dim=0, **options)
    names, place = device_mesh.mesh_dim_names or (), device_mesh.get_coordinate() or ()
    dims = [names.index(axis) for axis in (*replicate, shard)]
    others = [dim for dim in range(len(names)) if dim not in dims]
    here: Any = (..., *(place[dim] for dim in others))
    ranks = device_mesh.mesh.permute(*dims, *others)[here].flatten(end_dim=-2)
    groups = [group, device_mesh.get_group(shard)]
    both = DeviceMesh.from_group(
        groups, device_mesh.device_type, ranks.contiguous(), mesh_dim_names=("replicate", "shard")
    )
    return HSDPMeshInfo(both, replicate_mesh_dim=0, shard_mesh_dim=1, **options)


def sharded_dim(dim: int, axes: Any) -> Any:
    """Return a result of `shard_placement_fn`: the dim to shard, and the axes that `shard_axes` has returned."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    from torch.distributed.tensor import Shard

    return ShardPlacementResult(Shard(dim), axes)


def make_root(module: Any) -> None:
    """Make a module the root of FSDP2, unless a forward has done so.

    The root is the module of the first forward. If it is a module inside of the model, FSDP2 refuses a forward of the
    model later.
    """
    module._get_fsdp_state()._lazy_init()


def is_running_root(module: Any) -> bool:
    """Return whether a FSDP2 module has been called as the root of others; `reset_iter_state` raises for any other."""
    return bool(module._get_fsdp_state()._is_root)


def parameters_with_hooks(module: Any) -> Iterator[tuple[Any, str]]:
    """Yield owner and name of each parameter of a FSDP2 module, gathered or not, that has a hook for its gradient."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            if parameter.sharded_param._backward_hooks:
                yield parameter._module_info.module, parameter._module_info.param_name


def gathered_parameters(module: Any) -> Iterator[Tensor]:
    """Yield the gathered parameters of a FSDP2 module, also between their uses, when their storages may be empty."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                yield parameter._unsharded_param


def reset_root(root: Any) -> None:
    """Bring the root of FSDP2 modules, and those inside of it, into their state before a forward after an exception.

    The public `reset_iter_state` keeps gradients that FSDP2 has not reduced, so that a later backward would add them to
    its own. From torch 2.15 on it drops these, and the reduced gradients of earlier micro-batches as well.
    """
    states = root._get_fsdp_state()._state_ctx.all_states
    parameters = [each for state in states for group in state._fsdp_param_groups for each in group.fsdp_params]
    reduced = [parameter.sharded_param.grad for parameter in parameters]
    root.reset_iter_state()
    for parameter, gradient in zip(parameters, reduced, strict=True):
        parameter.sharded_param.grad = gradient
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
        if "unsharded_accumulated_grad" in vars(parameter):  # until torch 2.14, an attribute
            parameter.unsharded_accumulated_grad = None
