"""Shardings of the parameters of a module, from their logical names and the rules."""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from maxmoe.adapters import adapters_around
from maxmoe.declaration import Absent, declaration_of
from maxmoe.quantization import StackPart, stack_parts
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding, PartitionSpec
from maxmoe.sharding.rules import (
    DroppedAxis,
    LogicalRules,
    check_used,
    logical_to_mesh_axes,
    mesh_axes,
    resolve,
    unknown_names,
)

Names = tuple[str | None, ...]


@dataclass(frozen=True)
class ParameterSharding:
    """Sharding of a parameter and the names and axes that it follows from.

    Args:
        names: logical name of each dim; None for a parameter without names, which is replicated.
        requested: partition spec that the rules give, independent of mesh and shape.
        sharding: sharding on the mesh, with the axes of `requested` that can shard the shape.
        dropped: axes of `requested` that were dropped, with the reason.
        stack_part: part of a quantized stack that the parameter is; None for an ordinary parameter.
    """

    names: Names | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    requested: PartitionSpec
    sharding: NamedSharding
    dropped: tuple[DroppedAxis, ...]
    stack_part: StackPart | None = None

    @property
    def num_weights(self) -> int:
        """Number of weights over all ranks; for a quantized stack, counted at its codes."""
        if self.stack_part is None:
            return math.prod(self.shape)
        return self.shape[0] * math.prod(self.stack_part.sizes) if self.stack_part.part == "codes" else 0

    @property
    def indivisible(self) -> tuple[DroppedAxis, ...]:
        """Mesh axes that cannot shard the parameter evenly."""
        return tuple(drop for drop in self.dropped if self.sharding.mesh.size(drop.axis) > 1)


def logical_names(module: nn.Module) -> dict[str, Names]:
    """Collect the logical names that a module and its descendants declare; see `Declaration`.

    Returns:
        Logical name of each dim, by the path of the parameter.

    Raises:
        ValueError: for names of an unknown parameter, a number of names other than the number of dims, and names of
            activations.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    stacks = stack_parts(module)
    collected: dict[str, Names] = {}
    for path, owner in module.named_modules():
        for name, names in declaration_of(owner).logical_names.items():
            full_name = f"{path}.{name}" if path else name
            if full_name in parameters:
                _check(names, parameters[full_name], full_name)
                collected.setdefault(full_name, tuple(names))
            elif full_name in stacks:
                for part_name, part in stacks[full_name].items():
                    _check(names, parameters[part_name], full_name)
                    collected.setdefault(part_name, part.names(tuple(names)))
            elif not _is_optional(owner, name):
                raise ValueError(
                    f"the logical_names of {type(owner).__name__} have {name!r}, which is not among its parameters"
                    f"{adapters_around(full_name, parameters)}"
                )
    return collected


def _check(names: Names, parameter: nn.Parameter, name: str) -> None:
    if isinstance(names, str) or len(names) != parameter.dim():
        raise ValueError(
            f"{name} must have one logical name per dim of its shape {tuple(parameter.shape)}, got {names!r}"
        )
    of_activations = [part for part in names if part is not None and part.startswith("activation_")]
    if of_activations:
        raise ValueError(f"{name} is a parameter, {of_activations[0]!r} is a name for activations: {names!r}")


def _is_optional(owner: nn.Module, name: str) -> bool:
    """Return whether a part of the path `name` is None or absent: an optional part, or one of another stage."""
    value: object = owner
    for part in name.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
        if value is None or isinstance(value, Absent):
            return True
    return False


def declared_names(module: nn.Module) -> Iterator[str]:
    """Yield all logical names that a module and its descendants declare, including names of activations."""
    for owner in module.modules():
        declaration = declaration_of(owner)
        yield from (name for names in declaration.logical_names.values() for name in names if name is not None)
        for name in declaration.tensor_parallel_dims:
            yield from (name, tensor_parallel_activation(name))


def tensor_parallel_activation(name: str) -> str:
    """Return the logical name of the activation dim that a tensor-parallel dim of weights produces."""
    return {"q_heads": "activation_heads"}.get(name, f"activation_{name}")


def parameter_shardings(
    module: nn.Module, mesh: Mesh, rules: LogicalRules, *, strict: bool = False, allow_unused: bool = False
) -> dict[str, ParameterSharding]:
    """Compute the sharding of every parameter of a module.

    Args:
        module: module whose parameters have logical names, see `Declaration`; may be on the meta device.
        mesh: mesh on which parameters are sharded; may be planned.
        rules: rules that map logical names to mesh axes.
        strict: raise for names without rules, parameters without names, and dims that their axes do not divide;
            otherwise these dims are not sharded.
        allow_unused: accept mesh axes that no rule has, and rules with names or axes that nothing else has; otherwise
            raise, see `check_used`.

    Returns:
        Sharding by the path of the parameter, in the order of `named_parameters`; shared parameters are listed once. A
        quantized weight is listed as its codes, scales and zero points.

    Raises:
        ValueError: as `logical_names`; unless allow_unused, as `check_used`; if strict, as `logical_to_mesh_axes` and
            `resolve`, with the parameter's name.
    """
    shardings = shardings_by_name(module, mesh, rules, strict=strict, allow_unused=allow_unused)
    for warning in names_without_rules(shardings, rules):
        warnings.warn(warning, stacklevel=2)
    return shardings


def names_without_rules(shardings: Mapping[str, ParameterSharding], rules: LogicalRules) -> list[str]:
    """Return a warning for each logical name of a parameter that has no rule."""
    every = (message for sharding in shardings.values() for message in unknown_names(sharding.names or (), rules))
    return [f"{message}; its dim is not sharded" for message in dict.fromkeys(every)]


def shardings_by_name(
    module: nn.Module, mesh: Mesh, rules: LogicalRules, *, strict: bool, allow_unused: bool
) -> dict[str, ParameterSharding]:
    """Compute `parameter_shardings` without its warnings."""
    if not allow_unused:
        check_used(mesh, rules, declared_names(module))
    names_of, shardings = logical_names(module), {}
    part_of = {name: part for parts in stack_parts(module).values() for name, part in parts.items()}
    for name, parameter in module.named_parameters():
        shape, names = tuple(parameter.shape), names_of.get(name)
        if names is None and strict:
            raise ValueError(f"{name} of shape {shape} has no logical names")
        try:
            dims = names or (None,) * len(shape)
            requested = logical_to_mesh_axes(dims, rules, strict=True) if strict else mesh_axes(dims, rules)
            spec, dropped = resolve(requested, mesh.sizes, shape, strict=strict)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        sharding = NamedSharding(mesh, spec)
        shardings[name] = ParameterSharding(
            names, shape, parameter.dtype, requested, sharding, dropped, part_of.get(name)
        )
    return shardings
