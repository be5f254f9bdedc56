"""What becomes of every parameter of a module on a mesh: where it is stored, who gathers it, who sums its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from maxmoe.nn.parallel import TOKENS
from maxmoe.sharding.assign import Assignment
from maxmoe.sharding.fsdp import blocks, left_to_fsdp
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.movement import Layout
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.rules import LogicalRules
from maxmoe.sharding.sharded_tokens import ShardedTokens, activation_axes, token_sharding
from maxmoe.sharding.unit import ParameterMoves, parameter_moves


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter, and where it goes before it is used.

    Args:
        assignment: where it is stored.
        moves: to its use and back.
        unit: path of the module that gathers it, for as long as it runs; "" for the whole model.
        block: path of the block with which FSDP gathers it, "" for the rest of the model; None without FSDP.
    """

    assignment: Assignment
    moves: ParameterMoves
    unit: str
    block: str | None

    def bytes(self, layout: Layout) -> int:
        """Of every rank's part in a layout."""
        sharding = NamedSharding(self.assignment.sharding.mesh, layout.spec)
        return sharding.bytes(self.assignment.shape, self.assignment.dtype)


class Plan:
    """What `parallelize` makes of a module.

    Args:
        module: not parallelized yet.
        mesh: of the ranks, planned or not.
        rules: the table.
        assignments: of all parameters.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, rules: LogicalRules, assignments: dict[str, Assignment]) -> None:
        self.mesh = mesh
        self.tokens = ShardedTokens(mesh, *token_sharding(mesh, rules).spec)
        self.modules = dict(module.named_modules())
        self.paths = {child: path for path, child in self.modules.items()}
        self.units = units(module)
        self.by_fsdp = left_to_fsdp(assignments, self.tokens)
        self.kept: dict[nn.Module, tuple[str, ...]] = {}
        self.parameters: dict[str, PlannedParameter] = {}
        block_modules = set(blocks(module))
        for unit, names in self.units.items():
            self.kept[unit] = kept_axes(unit, [assignments[name] for name in names.values()], mesh, rules)
            block = next((path for path in around(self.paths[unit]) if self.modules[path] in block_modules), "")
            for name in names.values():
                axes = self.by_fsdp.axes if name in self.by_fsdp.dims else ()
                spec = assignments[name].sharding.spec
                moves = parameter_moves(spec, self.tokens, kept=self.kept[unit], by_fsdp=axes)
                self.parameters[name] = PlannedParameter(
                    assignments[name], moves, self.paths[unit], block if axes else None
                )

    def recomputed(self, path: str) -> str | None:
        """Find the block around a module, or itself, that is computed again in the backward; None if none is."""
        return next((outer for outer in around(path) if getattr(self.modules[outer], "is_recomputed", False)), None)


def around(path: str) -> list[str]:
    """List the paths of a module and of all around it, the innermost first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


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
        _, _, axes = activation_axes((*TOKENS, activation), mesh, rules)
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
