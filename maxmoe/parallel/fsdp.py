"""FSDP2 for the `fsdp` axis: prefetches the parameters of the next block and frees those of the previous block."""

from collections import defaultdict
from collections.abc import Iterator

from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Shard

from maxmoe._torch_fsdp import is_running_root, reset_root
from maxmoe.parallel.parameter_sharding import ParameterSharding
from maxmoe.parallel.plan import Plan
from maxmoe.parallel.sharded_tokens import ShardedTokens
from maxmoe.sharding.named_sharding import NamedSharding

SHARD_AXIS, REPLICATE_AXIS = "fsdp", "data"
# Modules that are never called, so that hooks around their forward never run.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def fsdp_axes(parameter: ParameterSharding, used: NamedSharding, tokens: ShardedTokens) -> tuple[str, ...]:
    """Return the axes over which FSDP2 reduces the gradient of a parameter; none for one that it cannot shard.

    FSDP2 gathers the parameter over the last of these axes. `used` is the sharding in which modules use the parameter.

    - FSDP2 shards the local shard of other axes, so `fsdp` must be the minor axis of its dim.
    - FSDP2 gathers over `fsdp`, so no rank may compute with its shard along `fsdp` only.
    - FSDP2 sums gradients over `fsdp`, so the ranks along `fsdp` must hold different tokens.

    If the ranks along `data` hold different tokens as well, FSDP2 runs as HSDP: reduce-scatter over `fsdp`, then
    all-reduce over `data`.
    """
    axes = tuple(axis for axis in (REPLICATE_AXIS, SHARD_AXIS) if axis in tokens.axes)
    spec = parameter.sharding.spec
    is_managed = (
        SHARD_AXIS in axes
        and any(entry[-1:] == (SHARD_AXIS,) for entry in spec)
        and not any(REPLICATE_AXIS in entry for entry in spec)
        and not any(SHARD_AXIS in entry for entry in used.spec)
    )
    return axes if is_managed else ()


def fully_shard_blocks(module: nn.Module, plan: Plan) -> None:
    """Apply `torch.distributed.fsdp.fully_shard` to the blocks of a model and then to the rest of it.

    Parameters that FSDP cannot shard are ignored by it. Gradients are summed over the ranks, not averaged.
    """
    parameters = dict(module.named_parameters())
    managed = {parameters[name]: planned for name, planned in plan.parameters.items() if planned.fsdp_axes}
    ignored = {parameter for parameter in parameters.values() if parameter not in managed}

    def placement(parameter: nn.Parameter) -> Shard:
        spec = managed[parameter].stored.spec
        return Shard(next(dim for dim, axes in enumerate(spec) if SHARD_AXIS in axes))

    for block in (*blocks(module), module):
        if any(parameter in managed for parameter in block.parameters()):
            fsdp_module = fsdp.fully_shard(
                block,
                mesh=plan.mesh.device_mesh,
                # Also for the root module. Otherwise its parameters would stay gathered after an evaluation, as plain
                # tensors, and an optimizer made then would hold these instead of the shards.
                reshard_after_forward=True,
                dp_mesh_dims=_mesh_dims(plan),
                shard_placement_fn=placement,
                ignored_params=ignored,
            )
            # FSDP averages by default, but the loss is already divided by the global number of tokens. A factor other
            # than the group size needs SUM, because gloo has no PREMUL_SUM.
            fsdp_module.set_gradient_divide_factor(1.0)
            fsdp_module.set_force_sum_reduction_for_comms(True)


def fully_shard_stage(stage: nn.Module, model: nn.Module, plan: Plan, *, reshards: bool) -> None:
    """Make a module around a model the root of FSDP2, so that a schedule finds the FSDP2 modules of its stage.

    Args:
        stage: module without parameters of its own, which calls `model`.
        model: model with the plan.
        plan: plan of the model.
        reshards: whether parameters are freed after each forward. A schedule with a split backward looks for the
            gathered parameters between forward and backward, so that they must stay.
    """
    if any(isinstance(module, fsdp.FSDPModule) for module in model.modules()):
        root = fsdp.fully_shard(
            stage, mesh=plan.mesh.device_mesh, dp_mesh_dims=_mesh_dims(plan), ignored_params=set(model.parameters())
        )
        root.set_reshard_after_forward(reshards)


def reset_fsdp(module: nn.Module) -> None:
    """Bring FSDP2 into its state before a forward after an exception.

    Parameters are sharded, and gradients that have not been reduced are dropped: a later backward would add them to its
    own.
    """
    for child in fsdp_modules(module):
        if is_running_root(child):  # a block outside of which nothing is sharded is a root of its own
            reset_root(child)


def fsdp_modules(module: nn.Module) -> Iterator[fsdp.FSDPModule]:
    """Yield the FSDP2 modules among a module and its children."""
    return (child for child in module.modules() if isinstance(child, fsdp.FSDPModule))


# Quoted, so that device checks can import this module with a torch that lacks the class.
def _mesh_dims(plan: Plan) -> "fsdp.DataParallelMeshDims":
    replicate_axes = tuple(axis for axis in plan.tokens.axes if axis == REPLICATE_AXIS)
    return fsdp.DataParallelMeshDims(shard=SHARD_AXIS, replicate=replicate_axes or None)


def shared_by_blocks(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that several blocks of a model have, or a block and the rest of the model.

    FSDP2 would replace such a parameter by its shard in one of them only.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for part, is_block in _parts(module):
        for parameter in part.parameters(recurse=is_block):
            owners[parameter].add(part if is_block else module)
    return {parameter for parameter, modules in owners.items() if len(modules) > 1}


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in the outermost `nn.ModuleList`s, also those in lists and dicts inside of them."""
    return (part for part, is_block in _parts(module) if is_block)


def around_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with all blocks of a model, the outermost first: wrappers around a model, and the model."""
    found = set(blocks(module))
    while True:
        if module not in found and not isinstance(module, _CONTAINERS):
            yield module
        inner = [child for child in module.children() if found and found <= set(child.modules())]
        if not inner:
            return
        (module,) = inner[:1]


def _parts(module: nn.Module, *, in_list: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the blocks of a model and all modules outside of them, each with whether it is a block.

    Args:
        module: module to search.
        in_list: whether it is in a list.
    """
    yield module, False
    for child in module.children():
        if in_list and not isinstance(child, _CONTAINERS):
            yield child, True
        else:
            yield from _parts(child, in_list=in_list or isinstance(child, nn.ModuleList))
