"""Adapters on a mesh: their factors as stacks of matrices with the expert dim first, and back as PEFT saves them.

PEFT packs `lora_A` as ``(L * r, in)``, with the expert as the slowest index, and `lora_B` as ``(out, r * L)``, with the
expert as the fastest one: a shard of the experts is not a slice of it. On a mesh, they are ``(L, r, in)`` and
``(L, r, out)``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from maxmoe._torch.copies import copy_modules
from maxmoe.adapters.peft import wrappers_of
from maxmoe.checks.early_optimizers import mark_replaced
from maxmoe.checks.whole_tensors import is_dtensor
from maxmoe.declaration import Declaration, declaration_of


def factor_names(module: nn.Module) -> dict[str, int]:
    """Return the number of experts for the path of each factor beside stacks of matrices."""
    return {
        f"{path}.{name}": wrapper.num_experts for path, wrapper in wrappers_of(module) for name, _ in _factors(wrapper)
    }


@contextmanager
def stacked_factors(module: nn.Module) -> Iterator[None]:
    """Make declared stacks of all factors in a module; they are as before if the block raises."""
    packed = {}
    for path, wrapper in _packed_wrappers(module):
        packed.update({f"{path}.{name}": (wrapper, owner, owner.weight) for name, owner in _factors(wrapper)})
        _stack_factors(wrapper)
    try:
        yield
    except BaseException:
        for wrapper, owner, weight in packed.values():
            owner.weight = weight
            vars(wrapper).pop("declaration", None)
        raise
    for name, (_, _, weight) in packed.items():
        mark_replaced(weight, name)


def planned_copy(module: nn.Module) -> nn.Module:
    """Copy a module, whose tensors the copy shares, with stacks of factors: for plans, while others call the module."""
    copied = copy_modules(module)
    for _, wrapper in _packed_wrappers(copied):
        _stack_factors(wrapper)
    return copied


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Collect the trained parameters and all adapters of a model on every rank, as PEFT saves them in one process.

    Buffers of the modules in PEFT's `modules_to_save`, such as the correction bias of a router, are among them.

    All ranks must call it. Load saved adapters with ``PeftModel.from_pretrained`` before `parallelize`, on any mesh::

        state_dict = maxmoe.parallel.adapter_state_dict(model)
        if torch.distributed.get_rank() == 0:
            model.save_pretrained(folder, state_dict=state_dict)

    Args:
        model: model of PEFT after `maxmoe.parallelize`.

    Returns:
        Whole tensors on the CPU, by the path of the parameter or buffer.
    """
    counts, trained = factor_names(model), {name for name, each in model.named_parameters() if each.requires_grad}
    state_dict = {}
    tensor: Any
    for name, tensor in model.state_dict().items():
        # Names in the paths of the tensors of all adapters, active or not.
        if name in trained or ".lora_" in name or ".modules_to_save." in name:
            whole = (tensor.full_tensor() if is_dtensor(tensor) else tensor).cpu()
            is_stack = name in counts and whole.dim() == 3
            state_dict[name] = packed_as_by_peft(name, whole.expand(counts[name], -1, -1)) if is_stack else whole
    return state_dict


def packed_as_by_peft(name: str, stack: Tensor) -> Tensor:
    """Return a stack of factors, ``(L, r, in)`` or ``(L, r, out)``, as PEFT packs it."""
    if name.split(".")[-3] == "lora_A":  # not the name of the adapter, which follows, or of a module before
        return stack.flatten(0, 1)
    return stack.permute(2, 1, 0).flatten(1)


def stacked_from_peft(factor: Literal["lora_A", "lora_B"], packed: Tensor, rank: int) -> Tensor:
    """Return a factor that PEFT has packed as a stack, ``(L, r, in)`` or ``(L, r, out)``."""
    if factor == "lora_A":
        return packed.reshape(-1, rank, packed.shape[1])
    return packed.reshape(packed.shape[0], rank, -1).permute(2, 1, 0)


def _packed_wrappers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the wrappers whose factors are not stacks yet."""
    return ((path, wrapper) for path, wrapper in wrappers_of(module) if "declaration" not in vars(wrapper))


def _factors(wrapper: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the modules that own the factors of all adapters, with the paths of the factors in the wrapper."""
    for name in ("lora_A", "lora_B"):
        for adapter, owner in getattr(wrapper, name).items():
            yield f"{name}.{adapter}.weight", owner


def _stack_factors(wrapper: Any) -> None:
    """Replace the factors of a wrapper by stacks, and declare their logical names.

    The expert dim and the dims of the matrices have the names of the adapted parameter. A factor that the experts share
    has an expert dim of size one without a name: ranks with other experts hold it too, and sum its gradient.
    """
    from maxmoe.adapters import _peft

    for adapter in wrapper.lora_A:
        for owner, stack in zip((wrapper.lora_A, wrapper.lora_B), _peft.stored_stacks(wrapper, adapter), strict=True):
            weight = owner[adapter].weight
            owner[adapter].weight = nn.Parameter(stack.detach().contiguous(), weight.requires_grad)
    of_module = declaration_of(wrapper.get_base_layer())
    names = of_module.logical_names.get(wrapper.parameter_name)
    if names is None:
        wrapper.declaration = Declaration(fsdp_unit=True)  # factors are read outside of the modules that own them
        return
    expert, *dims = names
    of_a, of_b = reversed(dims) if _peft.is_swapped(wrapper) else dims
    ends = {"lora_A": of_a, "lora_B": of_b}
    wrapper.declaration = Declaration(
        logical_names={
            path: (expert if len(owner.weight) == wrapper.num_experts else None, None, ends[path.split(".")[0]])
            for path, owner in _factors(wrapper)
        },
        fsdp_unit=True,
        tensor_parallel_dims={name: size for name, size in of_module.tensor_parallel_dims.items() if name in dims},
    )
