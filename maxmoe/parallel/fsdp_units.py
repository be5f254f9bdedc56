"""FSDP units: the module that gathers each parameter before its forward."""

from torch import nn

from maxmoe.declaration import declaration_of
from maxmoe.recompute.named_parts import Checkpointed

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
    """Return whether a module has a forward, unlike a `nn.ParameterList`, which the module around it reads.

    Hooks around the forward of other modules never run.
    """
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_saved(unit: nn.Module, path: str) -> bool:
    """Return whether the backward reads a parameter of a FSDP unit, given its path in the unit.

    True for what is not known: the parameter is then gathered once more than necessary. If it is read after all, its
    memory is kept from the forward to the backward.
    """
    if path in declaration_of(unit).unsaved_parameters:
        return False
    is_table = type(unit).forward is nn.Embedding.forward and path == "weight"
    is_added = type(unit).forward is nn.Linear.forward and path == "bias"
    return not (is_table or is_added) or "forward" in vars(unit)
