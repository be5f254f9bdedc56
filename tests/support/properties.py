"""The properties of modules, which tools read: `inspect.getmembers`, `torch.jit.trace`, debuggers."""

from torch import nn


def read_properties(model: nn.Module) -> set[type[nn.Module]]:
    """Read every property that this package gives to a module of a model; return the types that are in the package."""
    seen = set()
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__module__.startswith("maxmoe."):
                for name in [name for name, value in vars(kind).items() if isinstance(value, property)]:
                    getattr(module, name)
        seen.add(type(module))
    return {kind for kind in seen if kind.__module__.startswith("maxmoe.")}
