"""Conversion of the parameters of a module to DTensors."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe.early_optimizers import mark_replaced
from maxmoe.parallel.parameter_sharding import ParameterSharding, parameter_shardings
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.rules import LogicalRules


def shard_parameters(
    module: nn.Module, mesh: Mesh, rules: LogicalRules, *, strict: bool = False, allow_unused: bool = False
) -> dict[str, ParameterSharding]:
    """Replace every parameter of a module by a DTensor that is sharded by the rules.

    Parameters on the meta device stay there with the shape of their shard: `to_empty` then allocates the shards only,
    and values come from a checkpoint or `reset_parameters`. Other parameters must be whole on every rank. They are
    broadcast from the first rank and sharded, one at a time. Their `.grad` is dropped. The optimizer must be made
    afterwards; `step` of an optimizer with the previous parameters raises a RuntimeError.

    Args:
        module: module whose parameters have logical names, see `Declaration`.
        mesh: mesh on which parameters are sharded.
        rules: rules that map logical names to mesh axes.
        strict: raise for names without rules, parameters without names, and dims that their axes do not divide;
            otherwise these dims are not sharded.
        allow_unused: accept names of mesh and rules that have no effect.

    Returns:
        Sharding of each parameter, by its path.

    Raises:
        ValueError: for a parameter that is a DTensor already, and as `parameter_shardings`; the module is not changed
            then.
    """
    parameters = parameter_shardings(module, mesh, rules, strict=strict, allow_unused=allow_unused)
    distribute_parameters(module, {name: parameter.sharding for name, parameter in parameters.items()})
    return parameters


def distribute_parameters(module: nn.Module, shardings: Mapping[str, NamedSharding]) -> None:
    """Replace parameters by DTensors, given the sharding by path; modules that share a parameter share its DTensor."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is a DTensor already, on {parameter.device_mesh}: a module is parallelized once")
    sharded = {
        parameter: nn.Parameter(_shard(parameter, shardings[name]), parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }
    for name, parameter in module.named_parameters():
        mark_replaced(parameter, name)
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
