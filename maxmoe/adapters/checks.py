"""Checks of where the adapters of a model are."""

from collections.abc import Mapping

from torch import nn

from maxmoe.adapters.peft import takes
from maxmoe.adapters.stacked import wrappers_of


def check_adapters(module: nn.Module, layer_type: type[nn.Module]) -> None:
    """Raise for adapters of other parts of layers than the experts, and of experts that do not take them."""
    wrappers = dict(wrappers_of(module))
    for path, wrapper in wrappers.items():
        experts, parameter = wrapper.get_base_layer(), wrapper.parameter_name
        if not takes(experts, parameter):
            raise ValueError(
                f"{path} must adapt experts that take low-rank factors, got {type(experts).__name__}.{parameter}: in "
                'models of transformers, call set_experts_implementation("maxmoe")'
            )
    beside_experts = set(wrappers.values())
    for path, layer in module.named_modules():
        for name, part in layer.named_children() if isinstance(layer, layer_type) else ():
            while part in beside_experts:
                part = part.get_submodule("base_layer")
            if hasattr(part, "base_layer"):
                raise ValueError(
                    f"{path}.{name}".lstrip(".") + f" must have no adapters around it, got {type(part).__name__}: "
                    "merge them before parallelize (PEFT: merge_and_unload); adapters of the experts' matrices may stay"
                )


def adapters_around(name: str, parameters: Mapping[str, object]) -> str:
    """Return the end of a message for a parameter of a module that PEFT has wrapped or copied."""
    module, _, parameter = name.rpartition(".")
    wrapped = (f"{module}.base_layer.{parameter}", f"{module}.original_module.{parameter}")
    if not any(each in parameters for each in wrapped):
        return ""
    return f": {module} has adapters around it, or is in modules_to_save: merge them before parallelize"
