"""FSDP units: the module that gathers each parameter before its forward."""

from torch import nn

from maxmoe.declaration import declaration_of
from maxmoe.recompute.named_parts import Checkpointed


def fsdp_units(module: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Assign every parameter to the module that gathers it, see `Declaration`.

    Returns, for each FSDP unit, the path in the model of each parameter, by its path in the unit. A shared parameter
    has its first path in the model.
    """
    first_path = {parameter: name for name, parameter in module.named_parameters()}
    units: dict[nn.Module, dict[str, str]] = {}

    def visit(owner: nn.Module, unit: nn.Module | None, path: str) -> None:
        declaration = declaration_of(owner)
        # A recomputed module runs alone in the backward, so it must gather its parameters itself.
        if declaration.fsdp_unit or declaration.tensor_parallel_dims or isinstance(owner, Checkpointed):
            unit, path = owner, ""
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            gathered_by, path_in_unit = (owner, name) if unit is None else (unit, path + name)
            units.setdefault(gathered_by, {})[path_in_unit] = first_path[parameter]
        for name, child in owner.named_children():
            visit(child, unit, f"{path}{name}.")

    visit(module, None, "")
    return units
