"""Running a module on a mesh: every rank its own tokens, parameters gathered for as long as they are used."""

from collections.abc import Sequence

from torch import nn

from maxmoe.sharding.assign import Assignment, assign
from maxmoe.sharding.fsdp import AXIS, fully_shard_blocks, left_to_fsdp
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.partition_spec import PartitionSpec
from maxmoe.sharding.resolve import logical_to_mesh_axes
from maxmoe.sharding.rules import LogicalRules
from maxmoe.sharding.shard_parameters import distribute_parameters
from maxmoe.sharding.sharded_tokens import ShardedTokens
from maxmoe.sharding.unit import ParallelUnit, parameter_moves


def parallelize(
    module: nn.Module, mesh: Mesh, rules: LogicalRules | str = "ep-as-dp", *, strict: bool = False
) -> nn.Module:
    """Shard the parameters of a module, and let it run on every rank's own tokens.

    Afterwards the module takes and returns plain tensors: the sequences that the axes of `activation_batch` give this
    rank, or the parts that those of `activation_length` give it. Ranks that differ on other axes hold the same tokens.
    Parameters and their gradients are DTensors. Each rank calls backward on the sum of its token losses plus the
    auxiliary loss, which is global: the gradients are those of the sum over all tokens plus the auxiliary loss, once.

    Parameters are gathered before the forward of their module, and their gradients scattered in the backward. Where it
    can, FSDP2 does that for the `fsdp` axis, block by block; see `left_to_fsdp`. A module with
    an attribute `parallel_dims` gets those of its children along with its own. The keys are logical names of dims
    inside of it, with the number of parts that may be told apart (heads, say). Where weights and activations of all of
    them lie on one axis, that axis is not gathered: the ranks along it compute a part of those dims each, and the sum
    of their outputs is taken. The outputs must be linear in the last of these dims.

    Args:
        module: with logical names, see `logical_names`.
        mesh: of the ranks.
        rules: the table, or the name of a preset.
        strict: see `assign`.

    Returns:
        The module.

    Raises:
        ValueError: for what `shard_parameters` refuses, and if the rules cut sequences that a layer needs whole.
    """
    rules = LogicalRules.load(rules) if isinstance(rules, str) else rules
    tokens = token_layout(mesh, rules)
    for path, child in module.named_modules():
        if tokens.length_axes and getattr(child, "needs_whole_sequences", False):
            raise ValueError(
                f"{path or type(child).__name__} needs whole sequences, cut here over {tokens.length_axes}"
            )
    assignments = assign(module, mesh, rules, strict=strict)
    by_fsdp = left_to_fsdp(assignments, tokens)
    distribute_parameters(
        module, {name: a.sharding.without(AXIS) if name in by_fsdp else a.sharding for name, a in assignments.items()}
    )
    for child in module.modules():
        if hasattr(child, "token_layout"):
            child.token_layout = tokens  # type: ignore[assignment]
    for unit, names in units(module).items():
        kept = kept_axes(unit, [assignments[name] for name in names.values()], mesh, rules)
        moves = {
            path: parameter_moves(
                assignments[name].sharding.spec, tokens, kept=kept, by_fsdp=(AXIS,) if name in by_fsdp else ()
            )
            for path, name in names.items()
        }
        ParallelUnit(mesh, kept, moves).attach(unit)
    fully_shard_blocks(module, mesh, by_fsdp)
    return module


def token_layout(mesh: Mesh, rules: LogicalRules) -> ShardedTokens:
    """Find the axes of a mesh that spread the tokens."""
    batch, length = activation_axes(("activation_batch", "activation_length"), mesh, rules)
    return ShardedTokens(mesh, batch, length)


def activation_axes(names: tuple[str, ...], mesh: Mesh, rules: LogicalRules) -> PartitionSpec:
    """Find the axes of an activation; a name without a rule has none."""
    spec = logical_to_mesh_axes([name if name in rules.names else None for name in names], rules)
    return PartitionSpec(*(tuple(axis for axis in axes if mesh.size(axis) > 1) for axes in spec))


def units(module: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Give every parameter to the module that gathers it.

    Args:
        module: the whole.

    Returns:
        For each of those modules, by the path of a parameter within it, the path within the whole; the first path of a
        shared parameter.
    """
    first_path = {parameter: name for name, parameter in module.named_parameters()}
    gathered: dict[nn.Module, dict[str, str]] = {}

    def visit(owner: nn.Module, unit: nn.Module | None, path: str) -> None:
        if hasattr(owner, "parallel_dims"):
            unit, path = owner, ""
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            place = (unit, path + name) if unit is not None else (owner, name)
            gathered.setdefault(place[0], {})[place[1]] = first_path[parameter]
        for name, child in owner.named_children():
            visit(child, unit, f"{path}{name}.")

    visit(module, None, "")
    return gathered


def kept_axes(unit: nn.Module, parameters: Sequence[Assignment], mesh: Mesh, rules: LogicalRules) -> tuple[str, ...]:
    """Find the axes over which a module computes parts of its `parallel_dims`: weights and activations lie on them.

    Args:
        unit: the module.
        parameters: that it gathers.
        mesh: of the ranks.
        rules: the table.

    Returns:
        The axes, in the order of the mesh; none for a module without such dims.
    """
    inner: dict[str, int] = getattr(unit, "parallel_dims", {})
    common = [axis for axis in mesh.axes if inner]
    for name in inner:
        activation = {"q_heads": "activation_heads"}.get(name, f"activation_{name}")
        _, _, axes = activation_axes(("activation_batch", "activation_length", activation), mesh, rules)
        specs = [
            assignment.sharding.spec[assignment.names.index(name)]
            for assignment in parameters
            if assignment.names is not None and name in assignment.names
        ]
        common = [axis for axis in common if axis in axes and all(axis in spec for spec in specs)]
    kept: list[str] = []
    for axis in common:
        if all(parts % mesh.size(*kept, axis) == 0 for parts in inner.values()):
            kept.append(axis)
    return tuple(kept)
