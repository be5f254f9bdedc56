"""Quantized stacks as plain parameters, which a mesh shards and gathers as it does all others.

The codes, scales and zero points of `up_proj` become the frozen parameters `up_proj_int4_codes`, `up_proj_int4_scales`
and `up_proj_int4_zeros`. The format is in the names, because a checkpoint in another format may have the same shapes.
The attribute `up_proj` of the module is a `QuantizedStack` of what these parameters are at the time: shards between the
steps, gathered tensors in the forward.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from maxmoe._torch import ConvertedModule, parameter_in_place, set_parameters
from maxmoe.early_optimizers import mark_replaced
from maxmoe.quantization.checks import check_values
from maxmoe.quantization.stack import QuantizedStack
from maxmoe.replaced_parameters import while_replaced

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_LAYOUTS = "quantized_stacks"


@dataclass(frozen=True)
class StackPart:
    """A parameter that is a part of a quantized stack.

    Args:
        part: "codes", "scales" or "zeros".
        format: name of the format.
        sizes: number of rows and of columns of the matrices.
        block: number of rows and of columns that share a scale.
        num_scales: number of scales along the rows and along the columns.
        is_transposed: whether the dims of the stack are the columns and the rows, in this order.
        dtype: dtype of the stack, in which modules compute.
    """

    part: str
    format: str
    sizes: tuple[int, int]
    block: tuple[int, int]
    num_scales: tuple[int, int]
    is_transposed: bool
    dtype: torch.dtype

    def names(self, of_stack: tuple[str | None, ...]) -> tuple[str | None, ...]:
        """Return the logical names of the dims of the part, given those of the stack.

        A scale of all rows or columns is needed with every shard of them, so that this dim has no name.
        """
        expert, *dims = of_stack
        rows, columns = reversed(dims) if self.is_transposed else dims
        if self.part == "codes":
            return expert, rows, columns
        return expert, *(
            name if count > 1 else None for name, count in zip((rows, columns), self.num_scales, strict=True)
        )


def with_split_stacks(*, kept: bool) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function of a module: quantized stacks are split while it runs, and afterwards if `kept`."""
    return while_replaced(_split, kept=kept)


def part_names(name: str, stack: QuantizedStack) -> dict[str, str]:
    """Return the names of the parameters that hold the parts of the stack with a name, by the names of the parts."""
    return {part: f"{name}_{stack.format}_{part}" for part in stack.parts()}


def split_stacks(module: nn.Module) -> dict[str, QuantizedStack]:
    """Return the stacks of a module, without its children, whose parts are parameters, by their names."""
    return {name: getattr(module, name) for name in vars(module).get(_LAYOUTS, ())}


def parts_of_stacks(module: nn.Module) -> Iterator[tuple[str, dict[str, StackPart]]]:
    """Yield the path of each split stack in a module and its descendants, and its parts by their paths."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, stack in split_stacks(owner).items():
            full_name = f"{path}.{name}" if path else name
            yield full_name, {key: _described(stack, part) for part, key in part_names(full_name, stack).items()}


def weights(module: nn.Module, *, recurse: bool = True) -> Iterator[Tensor]:
    """Yield the parameters of a module, with quantized stacks in the place of their parts."""
    stacks: dict[int, QuantizedStack | None] = {}  # by the id of a part; None for other parts than the codes
    for owner in module.modules() if recurse else (module,):
        for name, stack in split_stacks(owner).items():
            for part, key in part_names(name, stack).items():
                stacks[id(owner.get_parameter(key))] = stack if part == "codes" else None
    for parameter in module.parameters(recurse):
        weight = stacks.get(id(parameter), parameter)
        if weight is not None:
            yield weight


def load_stacks(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Hook of `load_state_dict` of a module with quantized stacks: put together those that the state dict has in parts.

    A module whose own stacks are split takes no whole ones: it has no shard of them.
    """
    for name, stack in split_stacks(module).items():
        if f"{prefix}{name}" in state_dict:
            parts = ", ".join(part_names(name, stack).values())
            raise ValueError(
                f"{prefix}{name} is sharded as {parts}, so the state dict must have these, got the whole weights: load "
                "it before parallelize"
            )
    for name, whole in module.named_parameters(prefix.removesuffix("."), recurse=False):
        if not isinstance(whole, QuantizedStack):
            continue
        keys = part_names(name, whole)
        if all(key in state_dict for key in keys.values()):
            state_dict[name] = whole.of_parts({part: state_dict.pop(key) for part, key in keys.items()})
        loaded = state_dict.get(name)
        if isinstance(loaded, QuantizedStack) and not loaded.is_meta:
            try:
                check_values(loaded.scales, loaded.zeros)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error


def _described(stack: QuantizedStack, part: str) -> StackPart:
    return StackPart(
        part,
        stack.format,
        (stack.rows, stack.columns),
        (stack.rows_per_scale, stack.columns_per_scale),
        (stack.scales.shape[1], stack.scales.shape[2]),
        stack.is_transposed,
        stack.dtype,
    )


class _Split(NamedTuple):
    """A module whose stacks have been split: its class and its parameters before."""

    module: nn.Module
    path: str
    kind: type[nn.Module]
    parameters: dict[str, nn.Parameter | None]

    def restore(self) -> None:
        set_parameters(self.module, self.parameters)
        self.module.__class__ = self.kind
        delattr(self.module, _LAYOUTS)

    def finish(self) -> None:
        for name, parameter in self.parameters.items():
            if isinstance(parameter, QuantizedStack):
                mark_replaced(parameter, f"{self.path}.{name}".removeprefix("."))


def _split(module: nn.Module) -> list[_Split]:
    """Split all stacks that are parameters of a module or its descendants."""
    shared: dict[int, dict[str, nn.Parameter]] = {}
    split = []
    for path, owner in module.named_modules():
        own = owner.named_parameters(recurse=False, remove_duplicate=False)
        stacks = {name: stack for name, stack in own if isinstance(stack, QuantizedStack) and stack.dim() == 3}
        if stacks:
            kind: Any = type(owner)
            split.append(_Split(owner, path, kind, _replace_by_parts(owner, stacks, shared)))
            setattr(owner, _LAYOUTS, {name: stack.detach().to("meta") for name, stack in stacks.items()})
            owner.__class__ = _with_attributes(kind, tuple(stacks))
    return split


def _replace_by_parts(
    owner: nn.Module, stacks: dict[str, QuantizedStack], shared: dict[int, dict[str, nn.Parameter]]
) -> dict[str, nn.Parameter | None]:
    """Replace the stacks of a module by their parts, and return the parameters that it had.

    Args:
        owner: module with the stacks.
        stacks: the stacks, by their names.
        shared: parts by the id of their stack, filled here, so that modules that share a stack share its parts.
    """
    before = set_parameters(owner, {})
    after: dict[str, nn.Parameter | None] = {}
    for name, parameter in before.items():
        if name not in stacks:
            after[name] = parameter
            continue
        if id(parameter) not in shared:
            parts = stacks[name].parts()
            shared[id(parameter)] = {part: nn.Parameter(tensor, requires_grad=False) for part, tensor in parts.items()}
        after |= {key: shared[id(parameter)][part] for part, key in part_names(name, stacks[name]).items()}
    set_parameters(owner, after)
    return before


class _SplitModule(ConvertedModule):
    """Base of the classes of modules with split stacks."""

    def conversion(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Keep the dtype of the scales, which belongs to the format; change the dtype of the stacks alone."""
        layouts: dict[str, QuantizedStack] = vars(self)[_LAYOUTS]
        of_stacks = {
            id(parameter_in_place(self, part_names(name, layout)["scales"])) for name, layout in layouts.items()
        }
        for name, layout in layouts.items():
            dtype = function(torch.empty(0, dtype=layout.dtype)).dtype
            layouts[name] = layout.with_parts(dtype=dtype)

        def convert(tensor: Tensor) -> Tensor:
            converted = function(tensor)
            is_rounded = id(tensor) in of_stacks and converted.dtype != tensor.dtype
            return tensor.to(converted.device) if is_rounded else converted

        return convert

    def extra_repr(self) -> str:
        """Add the formats of the stacks."""
        stacks = (
            f"{name}={stack.format} {tuple(stack.shape)} {stack.dtype}" for name, stack in split_stacks(self).items()
        )
        return ", ".join(filter(None, (super().extra_repr(), *stacks)))


@functools.cache
def _with_attributes(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass with the name of its base, whose attributes with the names of stacks are made of their parts.

    `torch.nn.utils.parametrize` does the same.
    """

    def attribute(name: str) -> property:
        def stack(module: nn.Module) -> QuantizedStack:
            layout: QuantizedStack = vars(module)[_LAYOUTS][name]
            names = part_names(name, layout)
            parts = {part: getattr(module, key) for part, key in names.items()}
            if parts["scales"].requires_grad:
                raise RuntimeError(
                    f"{names['scales']} must be frozen, as all quantized weights, got requires_grad=True"
                )
            return layout.of_parts(parts)

        return property(stack)

    members = {name: attribute(name) for name in names}
    return type(kind.__name__, (_SplitModule, kind), {**members, "__module__": kind.__module__})
