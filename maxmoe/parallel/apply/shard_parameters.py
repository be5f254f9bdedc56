"""Conversion of the parameters of a module to DTensors."""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe._torch import as_parameter
from maxmoe.checks.early_optimizers import mark_replaced
from maxmoe.parallel.plan.parameter_sharding import ParameterSharding, names_without_rules, shardings_by_name
from maxmoe.ranks.named_collectives import broadcast
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.rules import LogicalRules

BUCKET_BYTES = 16 * 2**20  # of parameters that are broadcast together


def shard_parameters(
    module: nn.Module, mesh: Mesh, rules: LogicalRules, *, strict: bool = False, allow_unused: bool = False
) -> dict[str, ParameterSharding]:
    """Replace every parameter of a module by a DTensor that is sharded by the rules.

    Parameters on the meta device stay there with the shape of their shard: `to_empty` then allocates the shards only,
    and values come from a checkpoint or `reset_parameters`. Other parameters must be whole on every rank. They are
    broadcast from the first rank in buckets of 16 MiB, and sharded. Their `.grad` is dropped. The optimizer must be
    made afterwards; `step` of an optimizer with the previous parameters raises a RuntimeError. Arguments as for
    `parameter_shardings`.

    Returns:
        Sharding of each parameter, by its path.

    Raises:
        ValueError: for a parameter that is a DTensor already, and as `parameter_shardings`; the module is not changed
            then.
    """
    parameters = shardings_by_name(module, mesh, rules, strict=strict, allow_unused=allow_unused)
    for warning in names_without_rules(parameters, rules) if mesh.rank == 0 else ():
        warnings.warn(warning, stacklevel=2)
    distribute_parameters(module, {name: parameter.sharding for name, parameter in parameters.items()})
    return parameters


def distribute_parameters(module: nn.Module, shardings: Mapping[str, NamedSharding]) -> None:
    """Replace parameters by DTensors, given the sharding by path; modules that share a parameter share its DTensor."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is a DTensor already, on {parameter.device_mesh}: a module is parallelized once")
    parameters, sharded = dict(module.named_parameters()), {}
    for names in _buckets(parameters):
        wholes = _broadcast([parameters[name] for name in names], shardings[names[0]].mesh)
        for name, whole in zip(names, wholes, strict=True):
            shard = _shard(whole, shardings[name])
            sharded[parameters[name]] = as_parameter(shard, requires_grad=parameters[name].requires_grad)
    for name, parameter in module.named_parameters():
        mark_replaced(parameter, name)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            setattr(owner, name, sharded[parameter])


def _buckets(parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Divide parameters into buckets of one dtype and device, in their order; larger parameters are alone."""
    buckets: list[list[str]] = []
    kind, free_bytes = None, 0
    for name, parameter in parameters.items():
        if (parameter.dtype, parameter.device) != kind or parameter.nbytes > free_bytes:
            buckets.append([])
            kind, free_bytes = (parameter.dtype, parameter.device), BUCKET_BYTES
        buckets[-1].append(name)
        free_bytes -= parameter.nbytes
    return buckets


@torch.no_grad()
def _broadcast(parameters: Sequence[Tensor], mesh: Mesh) -> Sequence[Tensor]:
    """Return the parameters of the first rank, from one broadcast per mesh axis; on the meta device there is none."""
    if parameters[0].is_meta:
        return parameters
    flat = [parameter.detach().flatten() for parameter in parameters]
    bucket = flat[0] if len(flat) == 1 else torch.cat(flat)
    for group in mesh.device_mesh.get_all_groups():
        broadcast(bucket, "parameters", group=group)
    parts = torch.split(bucket, [part.numel() for part in flat])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


@torch.no_grad()
def _shard(whole: Tensor, sharding: NamedSharding) -> DTensor:
    shape = whole.shape
    if whole.is_meta:
        local = whole.new_empty(sharding.shard_shape(shape))
    else:
        local = whole[sharding.slices(shape)].clone(memory_format=torch.contiguous_format)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, sharding.mesh.device_mesh, sharding.placements, run_check=False, shape=shape, stride=stride
    )
