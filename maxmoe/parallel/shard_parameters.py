"""Turning the parameters of a module into DTensors."""

import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from maxmoe.parallel.parameter_sharding import ParameterSharding, parameter_shardings
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.rules import LogicalRules

# The attribute of a parameter that a DTensor has replaced: its path.
REPLACED = "replaced_by_shard_of"


def shard_parameters(
    module: nn.Module, mesh: Mesh, rules: LogicalRules, *, strict: bool = False, allow_unused: bool = False
) -> dict[str, ParameterSharding]:
    """Make every parameter of a module a DTensor on a mesh, sharded as the rules say.

    Parameters on the meta device stay there with the shape of their shard: `to_empty` then allocates nothing more, and
    values come from a checkpoint or `reset_parameters`. All others must be whole on every rank; they are broadcast from
    the first rank, one at a time, and sharded. Their `.grad` is dropped. Make the optimizer afterwards: `step` raises
    RuntimeError in one that holds the parameters from before.

    Args:
        module: with logical names, see `Declaration`.
        mesh: of all its parameters.
        rules: the table.
        strict: unknown and missing names and dims that do not divide are errors; otherwise their dims are not sharded.
        allow_unused: see `parameter_shardings`.

    Returns:
        The sharding of each parameter.

    Raises:
        ValueError: for a parameter that is a DTensor already, and as `parameter_shardings`; nothing has changed then.
    """
    parameters = parameter_shardings(module, mesh, rules, strict=strict, allow_unused=allow_unused)
    distribute_parameters(module, {name: parameter.sharding for name, parameter in parameters.items()})
    return parameters


def distribute_parameters(module: nn.Module, shardings: Mapping[str, NamedSharding]) -> None:
    """Replace parameters by DTensors; modules that share a parameter share its DTensor.

    Args:
        module: the owner of the parameters.
        shardings: by path; of a shared parameter, under the first of its paths.

    Raises:
        ValueError: for a parameter that is a DTensor already.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} is a DTensor already, on {parameter.device_mesh}: a module is parallelized once")
    sharded = {
        parameter: nn.Parameter(_shard(parameter, shardings[name]), parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }
    for name, parameter in module.named_parameters():
        setattr(parameter, REPLACED, name)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            setattr(owner, name, sharded[parameter])
    _check_every_optimizer()


@functools.cache
def _check_every_optimizer() -> None:
    """Register the check, once.

    An optimizer skips parameters without gradients: one that was made too early would train nothing, silently.
    """
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := getattr(parameter, REPLACED, None)) is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} must be made after parallelize: it holds {name} as it was before, "
                    "which is trained no longer"
                )


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
