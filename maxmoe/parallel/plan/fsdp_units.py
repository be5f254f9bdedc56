"""What gathers each parameter: the FSDP unit before its forward, and FSDP2 over the `fsdp` axis before its block."""

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from maxmoe.declaration import declaration_of
from maxmoe.recompute.named_parts import Checkpointed
from maxmoe.sharding.named_sharding import NamedSharding

SHARD_AXIS = "fsdp"
# Modules that are never called, so that hooks around their forward never run.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# Modules of torch whose forward reads parameters of their children without calling these.
_READS_CHILDREN = (nn.MultiheadAttention,)


def fsdp_units(module: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Assign every parameter to the module that gathers it, see `Declaration`.

    Returns, for each FSDP unit, the path in the model of each parameter, by its path in the unit. A shared parameter
    has its first path in the model.
    """
    first_path = {parameter: name for name, parameter in module.named_parameters()}
    units: dict[nn.Module, dict[str, str]] = {}

    def visit(owner: nn.Module, gathered_by: nn.Module, path: str, *, in_unit: bool) -> None:
        if _is_fsdp_unit(owner) or (isinstance(owner, _READS_CHILDREN) and not in_unit):
            gathered_by, path, in_unit = owner, "", True
        elif has_forward(owner) and not in_unit:
            gathered_by, path = owner, ""
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            units.setdefault(gathered_by, {})[path + name] = first_path[parameter]
        for name, child in owner.named_children():
            visit(child, gathered_by, f"{path}{name}.", in_unit=in_unit)

    visit(module, module, "", in_unit=False)
    return units


def _is_fsdp_unit(module: nn.Module) -> bool:
    declaration = declaration_of(module)
    # A recomputed module runs alone in the backward, so it must gather its parameters itself.
    return declaration.fsdp_unit or bool(declaration.tensor_parallel_dims) or isinstance(module, Checkpointed)


def has_forward(module: nn.Module) -> bool:
    """Return whether hooks around a forward run, unlike for a `nn.ParameterList`, which the module around it reads."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_saved(unit: nn.Module, path: str) -> bool:
    """Return whether the backward reads a parameter of a FSDP unit, given its path in the unit.

    True for what is not known: the parameter is then gathered once more than necessary.
    """
    if path in declaration_of(unit).unsaved_parameters:
        return False
    is_table = type(unit).forward is nn.Embedding.forward and path == "weight"
    is_added = type(unit).forward is nn.Linear.forward and path == "bias"
    return not (is_table or is_added) or "forward" in vars(unit)


def fsdp_axes(stored: NamedSharding, gradient: NamedSharding) -> tuple[str, ...]:
    """Return the axes over which FSDP2 reduces the gradient of a parameter; none for one that it cannot shard.

    FSDP2 gathers the parameter over the last of these axes, `fsdp`. If the gradient is partial over other axes that
    replicate the parameter, FSDP2 runs as HSDP: reduce-scatter over `fsdp`, then all-reduce of the shards over these
    axes.

    - FSDP2 shards the local shard of other axes, so `fsdp` must be the minor axis of its dim.
    - FSDP2 gathers over `fsdp` and sums gradients over it, so each rank along `fsdp` must have a summand of the whole
      gradient that the modules compute.
    """
    if SHARD_AXIS not in gradient.partial or not any(axes[-1:] == (SHARD_AXIS,) for axes in stored.spec):
        return ()
    sharded = {axis for axes in stored.spec for axis in axes}
    replicated = (axis for axis in stored.mesh.sizes if axis in gradient.partial and axis not in sharded)
    return (*replicated, SHARD_AXIS)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in the outermost `nn.ModuleList`s, also those in lists and dicts inside of them."""
    return (part for part, is_block in _parts(module) if is_block)


def shared_by_blocks(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that several blocks of a model have, or a block and the rest of the model.

    FSDP2 would replace such a parameter by its shard in one of them only.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for part, is_block in _parts(module):
        for parameter in part.parameters(recurse=is_block):
            owners[parameter].add(part if is_block else module)
    return {parameter for parameter, modules in owners.items() if len(modules) > 1}


def _parts(module: nn.Module, *, in_list: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the blocks of a model and all modules outside of them, each with whether it is a block."""
    yield module, False
    for child in module.children():
        if in_list and not isinstance(child, CONTAINERS):
            yield child, True
        else:
            yield from _parts(child, in_list=in_list or isinstance(child, nn.ModuleList))
