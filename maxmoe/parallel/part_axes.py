"""Mesh axes along which the ranks compute parts of a module for the same tokens.

Ranks along an axis hold the same tokens unless the axis shards the tokens. Only ranks with the same tokens may compute
partial outputs, which are summed. An axis that the rules map to the tokens and to another dim shards the tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from maxmoe.declaration import EXPERT_TOKEN_DIMS, TOKEN_DIMS, declaration_of
from maxmoe.parallel.parameter_sharding import ParameterSharding, tensor_parallel_activation
from maxmoe.parallel.sharded_tokens import ShardedTokens, activation_spec
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.rules import LogicalRules


class PartAxes(NamedTuple):
    """The mesh axes that the rules give to a dim of activations.

    Attributes:
        computed: axes along which all ranks hold the same tokens, so that each may compute a part of the dim.
        of_tokens: axes that shard the tokens as well. Ranks along them hold different tokens, whose partial outputs
            cannot be summed, so the dim is not sharded over these axes, and weights are gathered over them.
    """

    computed: tuple[str, ...]
    of_tokens: tuple[str, ...]


def part_axes(names: tuple[str, ...], mesh: Mesh, rules: LogicalRules, tokens: ShardedTokens) -> PartAxes:
    """Decide over which axes ranks compute parts of the last one of the named dims; tokens have precedence."""
    *_, axes = activation_spec(names, mesh, rules)
    computed = tuple(axis for axis in axes if axis not in tokens.axes)
    return PartAxes(computed, tuple(axis for axis in axes if axis in tokens.axes))


def tensor_parallel_axes(
    unit: nn.Module, parameters: Sequence[ParameterSharding], rules: LogicalRules, tokens: ShardedTokens
) -> tuple[str, ...]:
    """Return the axes over which a module computes parts of its tensor-parallel dims; none without such dims.

    To these axes, the rules map both the weights and the activations of all these dims. All ranks along them hold the
    same tokens, and the product of their sizes divides the number of parts of each dim.
    """
    dims, mesh = declaration_of(unit).tensor_parallel_dims, tokens.mesh
    specs = [
        parameter.sharding.spec[parameter.names.index(name)]
        for name in dims
        for parameter in parameters
        if parameter.names is not None
        and name in parameter.names
        # Scales follow the codes, or else `check_blocks` raises.
        and (parameter.stack_part is None or parameter.stack_part.part == "codes")
    ]
    candidates = [activation_parts(name, rules, tokens).computed for name in dims]
    chosen: list[str] = []
    for axis in specs[0] if specs else ():  # in the order of the weights, which are sharded in this order
        is_common = all(axis in axes for axes in (*specs, *candidates))
        if is_common and all(parts % mesh.size(*chosen, axis) == 0 for parts in dims.values()):
            chosen.append(axis)
    return tuple(chosen)


def activation_parts(name: str, rules: LogicalRules, tokens: ShardedTokens) -> PartAxes:
    """Return the axes that the rules give to the activations of a tensor-parallel dim of weights."""
    others = EXPERT_TOKEN_DIMS if name.endswith("_moe") else TOKEN_DIMS
    return part_axes((*others, tensor_parallel_activation(name)), tokens.mesh, rules, tokens)


def embed_parts(rules: LogicalRules, tokens: ShardedTokens) -> PartAxes:
    """Return the axes that the rules give to the hidden dim of a residual stream."""
    return part_axes((*TOKEN_DIMS, "activation_embed"), tokens.mesh, rules, tokens)
