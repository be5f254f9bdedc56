"""FSDP2 for the `fsdp` axis: torch prefetches the parameters of the next block and frees those of the last one."""

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
    """The parameters that FSDP2 gathers, and whose gradients it reduces.

    Args:
        dims: the dim that FSDP2 shards, by the path of the parameter.
        axes: over which it reduces gradients; the last one is that over which it gathers parameters.
    """

    dims: dict[str, int]
    axes: tuple[str, ...]


def fsdp_managed(
    parameters: Mapping[str, ParameterSharding], used: Mapping[str, NamedSharding], tokens: ShardedTokens
) -> FSDPManaged:
    """Find the parameters whose `fsdp` axis FSDP2 can manage.

    FSDP2 shards what other axes leave of a dim, so `fsdp` must be the minor axis of its dim; it gathers the dim over
    `fsdp`, so no rank may compute with its own part; and it sums gradients over `fsdp`, so the ranks along it must hold
    different tokens. Where the ranks along `data` hold different tokens too, it
    runs as HSDP: reduce-scatter over `fsdp`, then all-reduce over `data`. FSDP2 of torch 2.11 does not accept
    parameters on meshes of more axes than its own: there it manages none.

    Args:
        parameters: by path.
        used: the sharding in which modules compute with each parameter.
        tokens: the axes that shard the tokens.

    Returns:
        The parameters and the axes.
    """
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

    Blocks are the children of its outermost `nn.ModuleList`s. Gradients are sums over the ranks, factor 1.0.

    Args:
        module: whose parameters are DTensors on the mesh, sharded over all axes but those of FSDP.
        mesh: of the ranks.
        managed: from `fsdp_managed`; all other parameters are ignored by FSDP.
    """
    parameters = dict(module.named_parameters())
    dim_of = {parameters[name]: dim for name, dim in managed.dims.items()}
    ignored = {parameter for parameter in parameters.values() if parameter not in dim_of}
    for block in (*blocks(module), module):
        if any(parameter in dim_of for parameter in block.parameters()):
            fsdp_module = fsdp.fully_shard(
                block,
                mesh=mesh.device_mesh,
                # The root module too: parameters that stay gathered after an evaluation are plain tensors, and an
                # optimizer made then would hold those instead of the shards.
                reshard_after_forward=True,
                dp_mesh_dims=fsdp.DataParallelMeshDims(shard=SHARD_AXIS, replicate=managed.axes[:-1] or None),
                shard_placement_fn=lambda parameter: Shard(dim_of[parameter]),
                ignored_params=ignored,
            )
            # FSDP averages by default; the loss is normalised by the global token count already. A factor other than
            # the group size also needs SUM: gloo has no PREMUL_SUM.
            fsdp_module.set_gradient_divide_factor(1.0)
            fsdp_module.set_force_sum_reduction_for_comms(True)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost `nn.ModuleList`s."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else blocks(child)
