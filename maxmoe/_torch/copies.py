"""Copies of modules that share their tensors, with private names of `nn.Module`."""

import copy

from torch import nn


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
