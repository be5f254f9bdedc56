"""Turning the parameters of a module into DTensors."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe.sharding.assign import Assignment, assign
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.rules import LogicalRules


def shard_parameters(
    module: nn.Module, mesh: Mesh, rules: LogicalRules, *, strict: bool = False
) -> dict[str, Assignment]:
    """Make every parameter of a module a DTensor on a mesh, sharded as the rules say.

    Parameters on the meta device stay there with the shape of their shard: `to_empty` then allocates nothing more, and
    values come from a checkpoint or `reset_parameters`. All others must be whole on every rank; the values of the
    first rank count, one parameter at a time. Gradients stay behind. Make the optimizer afterwards.

    Args:
        module: with logical names, see `logical_names`.
        mesh: of all its parameters.
        rules: the table.
        strict: unknown and missing names and dims that do not divide are errors; otherwise their dims are not sharded.

    Returns:
        Where each parameter went.

    Raises:
        ValueError: for a parameter that is a DTensor already, and as `assign`; then nothing has changed.
    """
    assignments = assign(module, mesh, rules, strict=strict)
    distribute_parameters(module, {name: assignment.sharding for name, assignment in assignments.items()})
    return assignments


def distribute_parameters(module: nn.Module, shardings: Mapping[str, NamedSharding]) -> None:
    """Put DTensors in place of parameters; what several modules share, they share afterwards.

    Args:
        module: the owner of the parameters.
        shardings: by path; of a shared parameter, under the first of its paths.

    Raises:
        ValueError: for a parameter that is a DTensor already.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is a DTensor already, on {parameter.device_mesh}")
    sharded = {
        parameter: nn.Parameter(_shard(parameter, shardings[name]), parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            setattr(owner, name, sharded[parameter])


@torch.no_grad()
def _shard(parameter: Tensor, sharding: NamedSharding) -> DTensor:
    shape = parameter.shape
    if parameter.is_meta:
        local = parameter.new_empty(sharding.shard_shape(shape))
    else:
        whole = parameter.detach().contiguous()
        for group in sharding.mesh.device_mesh.get_all_groups():
            dist.broadcast(whole, group=group, group_src=0)
        local = whole[sharding.slices(shape)].clone(memory_format=torch.contiguous_format)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, sharding.mesh.device_mesh, sharding.placements, run_check=False, shape=shape, stride=stride
    )
