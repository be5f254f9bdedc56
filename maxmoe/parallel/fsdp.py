"""FSDP2 for the `fsdp` axis: prefetches the parameters of the next block and frees those of the previous block."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Shard

from maxmoe.parallel.parameter_sharding import ParameterSharding
from maxmoe.parallel.sharded_tokens import ShardedTokens
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding

SHARD_AXIS, REPLICATE_AXIS = "fsdp", "data"


class FSDPManaged(NamedTuple):
    """Parameters that FSDP2 gathers and whose gradients it reduces.

    Args:
        dims: dim that FSDP2 shards, by the path of the parameter.
        axes: mesh axes over which FSDP2 reduces gradients; it gathers parameters over the last one.
    """

    dims: dict[str, int]
    axes: tuple[str, ...]


def fsdp_managed(
    parameters: Mapping[str, ParameterSharding], used: Mapping[str, NamedSharding], tokens: ShardedTokens
) -> FSDPManaged:
    """Find the parameters that FSDP2 can shard over `fsdp`; `used` is the sharding in which modules use a parameter.

    - FSDP2 shards the local shard of other axes, so `fsdp` must be the minor axis of its dim.
    - FSDP2 gathers over `fsdp`, so no rank may compute with its shard along `fsdp` only.
    - FSDP2 sums gradients over `fsdp`, so the ranks along `fsdp` must hold different tokens.

    If the ranks along `data` hold different tokens as well, FSDP2 runs as HSDP: reduce-scatter over `fsdp`, then
    all-reduce over `data`.
    """
    # Without DataParallelMeshDims (torch 2.11), FSDP2 rejects parameters on meshes with more axes than its own.
    axes = tuple(axis for axis in (REPLICATE_AXIS, SHARD_AXIS) if axis in tokens.axes)
    if SHARD_AXIS not in axes or not hasattr(fsdp, "DataParallelMeshDims"):
        return FSDPManaged({}, ())
    dims = {
        name: dim
        for name, parameter in parameters.items()
        for dim, axes_of_dim in enumerate(parameter.sharding.spec)
        if axes_of_dim[-1:] == (SHARD_AXIS,)
        and not any(REPLICATE_AXIS in entry for entry in parameter.sharding.spec)
        and not any(SHARD_AXIS in entry for entry in used[name].spec)
    }
    return FSDPManaged(dims, axes)


def fully_shard_blocks(module: nn.Module, mesh: Mesh, managed: FSDPManaged) -> None:
    """Apply `torch.distributed.fsdp.fully_shard` to the blocks of a model and then to the rest of it.

    Parameters that are not in `managed` are ignored by FSDP. Gradients are summed over the ranks, not averaged.
    """
    parameters = dict(module.named_parameters())
    dim_of = {parameters[name]: dim for name, dim in managed.dims.items()}
    ignored = {parameter for parameter in parameters.values() if parameter not in dim_of}
    for block in (*blocks(module), module):
        if any(parameter in dim_of for parameter in block.parameters()):
            fsdp_module = fsdp.fully_shard(
                block,
                mesh=mesh.device_mesh,
                # Also for the root module. Otherwise its parameters would stay gathered after an evaluation, as plain
                # tensors, and an optimizer made then would hold these instead of the shards.
                reshard_after_forward=True,
                dp_mesh_dims=fsdp.DataParallelMeshDims(shard=SHARD_AXIS, replicate=managed.axes[:-1] or None),
                shard_placement_fn=lambda parameter: Shard(dim_of[parameter]),
                ignored_params=ignored,
            )
            # FSDP averages by default, but the loss is already divided by the global number of tokens. A factor other
            # than the group size needs SUM, because gloo has no PREMUL_SUM.
            fsdp_module.set_gradient_divide_factor(1.0)
            fsdp_module.set_force_sum_reduction_for_comms(True)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost `nn.ModuleList`s."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else blocks(child)
