"""What `parallelize` will make of a module: which tensors move, and which are kept."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from maxmoe.nn import Activation
from maxmoe.sharding.assign import Assignment
from maxmoe.sharding.fsdp import AXIS, blocks, left_to_fsdp
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.movement import Layout, Move, take_sum
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.parallelize import kept_axes, token_layout, units
from maxmoe.sharding.rules import LogicalRules
from maxmoe.sharding.unit import ParameterMoves, parameter_moves

FORWARD, BACKWARD, GRADIENTS = "weights, forward", "weights, backward", "gradients of weights"


class Flow(NamedTuple):
    """A tensor on its way.

    Args:
        purpose: what it is, and when it moves.
        move: from layout to layout.
        shape: where the layouts do not shard it.
        bucket: flows with the same one share their collectives; None for a flow with its own.
    """

    purpose: str
    move: Move
    shape: tuple[int, ...]
    bucket: str | None = None


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter, and where it goes before it is used.

    Args:
        assignment: where it is stored.
        moves: to its use and back, after FSDP has gathered it and before FSDP sums its gradient.
        unit: path of the module that gathers it, for as long as it runs; "" for the whole model.
        bucket: path of the block with which FSDP gathers it, "" for the rest of the model; None without FSDP.
    """

    assignment: Assignment
    moves: ParameterMoves
    unit: str
    bucket: str | None

    def bytes(self, layout: Layout) -> int:
        """Of every rank's part in a layout."""
        sharding = NamedSharding(self.assignment.sharding.mesh, layout.spec)
        return sharding.bytes(self.assignment.shape, self.assignment.dtype)

    @property
    def gathered_again(self) -> Move:
        """The move of the value in the backward, which comes to the end of the model before FSDP does."""
        value = self.moves.value
        is_early = self.bucket == "" and value.source != value.target
        return Move(self.moves.stored, value.target) if is_early else value

    def flows(self) -> Iterator[Flow]:
        """Yield its way through a step."""
        yield Flow(FORWARD, self.moves.value, self.assignment.shape)
        yield Flow(BACKWARD, self.gathered_again, self.assignment.shape)
        yield Flow(GRADIENTS, self.moves.gradient, self.assignment.shape)
        if self.bucket is not None:
            spec = self.assignment.sharding.spec
            gathered = spec.without(AXIS)
            gather = Move(Layout(spec), Layout(gathered))
            yield Flow(FORWARD, gather, self.assignment.shape, self.bucket)
            yield Flow(BACKWARD, gather, self.assignment.shape, self.bucket)
            scatter = Move(Layout(gathered, (AXIS,)), Layout(spec))
            yield Flow(GRADIENTS, scatter, self.assignment.shape, self.bucket)


class Plan:
    """What `parallelize` will make of a module.

    Args:
        module: not parallelized yet.
        mesh: of the ranks.
        rules: the table.
        assignments: of all parameters.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, rules: LogicalRules, assignments: dict[str, Assignment]) -> None:
        self.mesh = mesh
        self.tokens = token_layout(mesh, rules)
        self.modules = dict(module.named_modules())
        self.kept: dict[nn.Module, tuple[str, ...]] = {}
        self.parameters: dict[str, PlannedParameter] = {}
        by_fsdp = left_to_fsdp(assignments, self.tokens)
        buckets = set(blocks(module))
        paths = {child: path for path, child in self.modules.items()}
        for unit, names in units(module).items():
            self.kept[unit] = kept_axes(unit, [assignments[name] for name in names.values()], mesh, rules)
            bucket = next((path for path in _around(paths[unit]) if self.modules[path] in buckets), "")
            for name in names.values():
                spec, axes = assignments[name].sharding.spec, (AXIS,) if name in by_fsdp else ()
                self.parameters[name] = PlannedParameter(
                    assignments[name],
                    parameter_moves(spec, self.tokens, kept=self.kept[unit], by_fsdp=axes),
                    paths[unit],
                    bucket if axes else None,
                )

    def recomputed(self, path: str) -> str | None:
        """Find the block around a module, or itself, that is computed again in the backward; None if none is."""
        return next((outer for outer in _around(path) if getattr(self.modules[outer], "is_recomputed", False)), None)

    def kept_for_backward(self, batch_size: int, sequence_length: int) -> Iterator[tuple[str, Activation]]:
        """Yield what a rank keeps from its forward to its backward.

        Args:
            batch_size: sequences of a step, over all ranks.
            sequence_length: their tokens.

        Yields:
            The path of the module that says so, and the tensor with its local shape.

        Raises:
            ValueError: if the axes that spread the tokens do not divide them.
        """
        for axes, length, owner in (
            (self.tokens.batch_axes, batch_size, "batch_size"),
            (self.tokens.length_axes, sequence_length, "sequence_length"),
        ):
            if length % self.mesh.size(*axes):
                product = " * ".join(f"{axis}={self.mesh.size(axis)}" for axis in axes)
                raise ValueError(f"{owner} ({length}) must be divisible by {product}, over which it is spread")
        for path, module in self.modules.items():
            if hasattr(module, "kept_for_backward"):
                for activation in module.kept_for_backward(batch_size, sequence_length).values():
                    yield path, activation._replace(shape=self._local_shape(module, activation))

    def _local_shape(self, module: nn.Module, activation: Activation) -> tuple[int, ...]:
        """Tokens stay on their rank, whichever experts they are routed to."""
        axes_of = {
            "activation_batch": self.tokens.batch_axes,
            "activation_batch_moe": self.tokens.batch_axes,
            "activation_length": self.tokens.length_axes,
            "activation_length_moe": self.tokens.length_axes,
        }
        for name in ("activation_heads", "activation_kv_heads", "activation_mlp"):
            axes_of[name] = self.kept.get(module, ())
        return tuple(
            length // self.mesh.size(*axes_of.get(name or "", ()))
            for length, name in zip(activation.shape, activation.names, strict=True)
        )

    def activation_flows(self, batch_size: int, sequence_length: int) -> Iterator[Flow]:
        """Yield what moves of the tokens: sums over kept axes, keys and values of cut sequences.

        Args:
            batch_size: sequences of a step, over all ranks.
            sequence_length: their tokens.

        Yields:
            The flows of a step.
        """
        batch = batch_size // self.mesh.size(*self.tokens.batch_axes)
        length = sequence_length // self.mesh.size(*self.tokens.length_axes)
        paths = {child: path for path, child in self.modules.items()}
        for unit, kept in self.kept.items():
            if kept:
                shape = (batch, length, _embed(unit, self.parameters, paths[unit]))
                yield from self._both_ways("sums of parts", paths[unit], take_sum(3, kept), take_sum(3, kept), shape)
        for path, activation in self.kept_for_backward(batch_size, sequence_length):
            if "activation_kv_length" in activation.names and self.tokens.length_axes:
                dims = len(activation.names)
                moves = self.tokens.sequence_moves(dims, activation.names.index("activation_kv_length"))
                yield from self._both_ways("keys and values", path, *moves, activation.shape)

    def _both_ways(
        self, purpose: str, path: str, value: Move, gradient: Move, shape: tuple[int, ...]
    ) -> Iterator[Flow]:
        yield Flow(f"{purpose}, forward", value, shape)
        yield Flow(f"{purpose}, backward", gradient, shape)
        if self.recomputed(path) is not None:
            yield Flow(f"{purpose}, backward", value, shape)


def _around(path: str) -> list[str]:
    """The paths of a module and of all around it, the innermost first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _embed(unit: nn.Module, parameters: dict[str, PlannedParameter], path: str) -> int:
    """The width of the input and the output of a module with kept axes: the dim "embed" of its weights."""
    name = next(iter(dict(unit.named_parameters())))
    assignment = parameters[f"{path}.{name}" if path else name].assignment
    return assignment.shape[(assignment.names or ()).index("embed")]
