"""FSDP2 for the `fsdp` axis: weights gathered ahead of use and dropped after it, by torch's own scheduler."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Shard

from maxmoe.sharding.assign import Assignment
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.sharded_tokens import ShardedTokens

SHARDS, REPLICAS = "fsdp", "data"


class LeftToFSDP(NamedTuple):
    """What FSDP2 takes care of.

    Args:
        dims: the dim that it shards, by the path of the parameter.
        axes: over which it sums gradients; over the last one it gathers values.
    """

    dims: dict[str, int]
    axes: tuple[str, ...]


def left_to_fsdp(assignments: Mapping[str, Assignment], tokens: ShardedTokens) -> LeftToFSDP:
    """Find the parameters whose `fsdp` axis FSDP2 can take care of.

    It cuts every block that other axes leave, so its axis must be the minor one of its dim; and it sums gradients,
    so its ranks must have tokens of their own. Where those of `data` have tokens of their own too, it sums over both:
    the parts, after it has scattered them. That of torch 2.11 takes no parameters on larger meshes.

    Args:
        assignments: by path.
        tokens: which axes spread the tokens.

    Returns:
        The parameters and the axes.
    """
    axes = tuple(axis for axis in (REPLICAS, SHARDS) if axis in (*tokens.batch_axes, *tokens.length_axes))
    if SHARDS not in axes or not hasattr(fsdp, "DataParallelMeshDims"):
        return LeftToFSDP({}, ())
    dims = {
        name: dim
        for name, assignment in assignments.items()
        for dim, others in enumerate(assignment.sharding.spec)
        if others[-1:] == (SHARDS,) and not any(REPLICAS in entry for entry in assignment.sharding.spec)
    }
    return LeftToFSDP(dims, axes)


def fully_shard_blocks(module: nn.Module, mesh: Mesh, by_fsdp: LeftToFSDP) -> None:
    """Apply `torch.distributed.fsdp.fully_shard` to the blocks of a model and then to the rest of it.

    Blocks are the children of its outermost `nn.ModuleList`s. Gradients are sums over the ranks, factor 1.0.

    Args:
        module: whose parameters are DTensors on the mesh.
        mesh: of the ranks.
        by_fsdp: what `left_to_fsdp` found; all other parameters stay as they are.
    """
    parameters = dict(module.named_parameters())
    dim_of = {parameters[name]: dim for name, dim in by_fsdp.dims.items()}
    ignored = {parameter for parameter in parameters.values() if parameter not in dim_of}
    for block in (*blocks(module), module):
        if any(parameter in dim_of for parameter in block.parameters()):
            unit = fsdp.fully_shard(
                block,
                mesh=mesh.device_mesh,
                reshard_after_forward=True,  # the last unit too: an optimizer made after an evaluation needs shards
                dp_mesh_dims=fsdp.DataParallelMeshDims(shard=SHARDS, replicate=by_fsdp.axes[:-1] or None),
                shard_placement_fn=lambda parameter: Shard(dim_of[parameter]),
                ignored_params=ignored,
            )
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost `nn.ModuleList`s."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else blocks(child)
