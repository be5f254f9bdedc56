"""Factors as stacks of matrices with the expert dim first, for a mesh.

PEFT packs `lora_A` as ``(L * r, in)``, with the expert as the slowest index, and `lora_B` as ``(out, r * L)``, with the
expert as the fastest one: a shard of the experts is not a slice of it. On a mesh, they are ``(L, r, in)`` and
``(L, r, out)``.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from maxmoe._torch.copies import copy_modules
from maxmoe.adapters.peft import connect
from maxmoe.checks.early_optimizers import mark_replaced
from maxmoe.declaration import Declaration, SavedTensor, declaration_of


def wrappers_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the wrappers of PEFT in a module whose factors lie beside stacks of matrices, with their paths."""
    if "peft" not in sys.modules:
        return
    from maxmoe.adapters import _peft

    for path, child in module.named_modules():
        if isinstance(child, _peft.ParamWrapper) and _peft.parameter_of(child).dim() == 3:
            connect()  # PEFT may have been imported after this library
            yield path, child


def factor_names(module: nn.Module) -> frozenset[str]:
    """Return the paths of the factors beside stacks of matrices."""
    return frozenset(f"{path}.{name}" for path, wrapper in wrappers_of(module) for name, _ in _factors(wrapper))


@contextmanager
def stacked_factors(module: nn.Module) -> Iterator[None]:
    """Make declared stacks of all factors in a module; they are as before if the block raises."""
    wrappers = dict(_packed_wrappers(module))
    packed = {
        f"{path}.{name}": (owner, owner.weight)
        for path, wrapper in wrappers.items()
        for name, owner in _factors(wrapper)
    }
    for wrapper in wrappers.values():
        _stack_factors(wrapper)
    try:
        yield
    except BaseException:
        for owner, weight in packed.values():
            owner.weight = weight
        for wrapper in wrappers.values():
            del wrapper.declaration
        raise
    for name, (_, weight) in packed.items():
        mark_replaced(weight, name)


def planned_copy(module: nn.Module) -> nn.Module:
    """Copy a module, whose tensors the copy shares, with stacks of factors: for plans, while others call the module."""
    copied = copy_modules(module)
    for _, wrapper in _packed_wrappers(copied):
        _stack_factors(wrapper)
    return copied


def _packed_wrappers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the wrappers whose factors are not stacks yet."""
    return ((path, wrapper) for path, wrapper in wrappers_of(module) if "declaration" not in vars(wrapper))


def packed_as_by_peft(name: str, stack: Tensor) -> Tensor:
    """Return a stack of factors, ``(L, r, in)`` or ``(L, r, out)``, as PEFT packs it."""
    if name.split(".")[-3] == "lora_A":  # not the name of the adapter, which follows, or of a module before
        return stack.flatten(0, 1)
    return stack.permute(2, 1, 0).flatten(1)


def _factors(wrapper: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the modules that own the factors of all adapters, with the paths of the factors in the wrapper."""
    for name in ("lora_A", "lora_B"):
        for adapter, owner in getattr(wrapper, name).items():
            yield f"{name}.{adapter}.weight", owner


def _stack_factors(wrapper: Any) -> None:
    """Replace the factors of a wrapper by stacks, and declare their logical names."""
    from maxmoe.adapters import _peft

    for adapter in wrapper.lora_A:
        for owner, stack in zip((wrapper.lora_A, wrapper.lora_B), _peft.stacks(wrapper, adapter), strict=True):
            weight = owner[adapter].weight
            owner[adapter].weight = nn.Parameter(stack.detach().contiguous(), weight.requires_grad)
    wrapper.declaration = _declaration(wrapper)


def _declaration(wrapper: Any) -> Declaration:
    """Declare the factors: the expert dim and the dims of the matrices have the names of the adapted parameter."""
    from maxmoe.adapters import _peft

    module, parameter = wrapper.get_base_layer(), wrapper.parameter_name
    of_module = declaration_of(module)
    names = of_module.logical_names.get(parameter)
    if names is None:
        return Declaration(fsdp_unit=True)  # factors are read outside of the modules that own them
    expert, *dims = names
    of_a, of_b = reversed(dims) if _peft.is_swapped(wrapper) else dims
    ends = {"lora_A": of_a, "lora_B": of_b}

    def saved_tensors(batch: int, length: int) -> dict[str, SavedTensor]:
        """The rows times `lora_A` of the active adapters, as many rows as of the tensors that the module saves."""
        saved = {} if of_module.saved_tensors is None else of_module.saved_tensors(batch, length)
        rows = saved.get("preactivations")
        if rows is None:
            return {}
        rank = sum(wrapper.r[adapter] for adapter in wrapper.active_adapters if adapter in wrapper.r)
        return {"reduced": rows._replace(shape=(*rows.shape[:-1], rank), names=(*rows.names[:-1], None))}

    return Declaration(
        logical_names={path: (expert, None, ends[path.split(".")[0]]) for path, _ in _factors(wrapper)},
        fsdp_unit=True,
        tensor_parallel_dims={name: size for name, size in of_module.tensor_parallel_dims.items() if name in dims},
        saved_tensors=saved_tensors,
    )
