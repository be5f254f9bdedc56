"""Copies of modules that share their tensors, with private names of `nn.Module`."""

import copy
from collections.abc import Callable

from torch import Tensor, nn


def shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module; the copy has the same children, parameters and buffers.

    With `copy.copy` alone, both modules would have one table of children and of hooks, so that a child or a hook added
    to the copy would be added to the original.
    """
    result = copy.copy(module)
    for name, value in module.__dict__.items():
        # RNNs have a list of their parameters.
        if name in ("_modules", "_flat_weights") or name.endswith(
            ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
        ):
            result.__dict__[name] = copy.copy(value)
    return result


def copy_modules(module: nn.Module) -> nn.Module:
    """Copy a module with all modules in it; the copies have the same parameters and buffers, in tables of their own."""
    copies = {each: shallow_copy(each) for each in module.modules()}
    for each, copied in copies.items():
        copied._parameters, copied._buffers = dict(each._parameters), dict(each._buffers)
        copied._modules = {name: child if child is None else copies[child] for name, child in each._modules.items()}
    return copies[module]


def replace_tensors(module: nn.Module, new: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of a module by what a function makes of it; shared ones stay shared.

    Parameters become parameters that require a gradient if they did. `Module._apply` makes several of a shared one.
    """
    made: dict[int, Tensor] = {}
    for each in module.modules():
        for table in (each._parameters, each._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    replaced = new(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(replaced, tensor.requires_grad) if is_parameter else replaced
                table[name] = made[id(tensor)]  # type: ignore[assignment]
