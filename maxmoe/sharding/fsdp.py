"""FSDP2 for the `fsdp` axis: weights gathered ahead of use and dropped after it, by torch's own scheduler."""

from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Shard

from maxmoe.sharding.assign import Assignment
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.sharded_tokens import ShardedTokens

AXIS = "fsdp"


def left_to_fsdp(assignments: Mapping[str, Assignment], tokens: ShardedTokens) -> dict[str, int]:
    """Find the parameters whose `fsdp` axis FSDP2 can take care of.

    It cuts every block that other axes leave, so its axis must be the minor one of its dim; and it sums gradients,
    so its ranks must have tokens of their own. That of torch 2.11 takes no parameters on larger meshes.

    Args:
        assignments: by path.
        tokens: which axes spread the tokens.

    Returns:
        The dim that FSDP2 shards, by the path of the parameter.
    """
    if AXIS not in (*tokens.batch_axes, *tokens.length_axes) or not hasattr(fsdp, "DataParallelMeshDims"):
        return {}
    return {
        name: dim
        for name, assignment in assignments.items()
        for dim, axes in enumerate(assignment.sharding.spec)
        if axes[-1:] == (AXIS,)
    }


def fully_shard_blocks(module: nn.Module, mesh: Mesh, dims: Mapping[str, int]) -> None:
    """Apply `torch.distributed.fsdp.fully_shard` to the blocks of a model and then to the rest of it.

    Blocks are the children of its outermost `nn.ModuleList`s. Gradients are sums over the ranks, factor 1.0.

    Args:
        module: whose parameters are DTensors on the mesh.
        mesh: of the ranks.
        dims: what `left_to_fsdp` found; all other parameters stay as they are.
    """
    parameters = dict(module.named_parameters())
    dim_of = {parameters[name]: dim for name, dim in dims.items()}
    ignored = {parameter for parameter in parameters.values() if parameter not in dim_of}
    for block in (*blocks(module), module):
        if any(parameter in dim_of for parameter in block.parameters()):
            unit = fsdp.fully_shard(
                block,
                mesh=mesh.device_mesh,
                reshard_after_forward=True,  # the last unit too: an optimizer made after an evaluation needs shards
                dp_mesh_dims=fsdp.DataParallelMeshDims(shard=AXIS),
                shard_placement_fn=lambda parameter: Shard(dim_of[parameter]),
                ignored_params=ignored,
            )
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost `nn.ModuleList`s."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else blocks(child)
