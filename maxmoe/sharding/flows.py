"""What moves in a training step, and what is kept: the plan of `parallelize`, with sizes."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from maxmoe.nn import Activation
from maxmoe.sharding.movement import Move, take_sum
from maxmoe.sharding.plan import Plan, PlannedParameter

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


def parameter_flows(parameter: PlannedParameter) -> Iterator[Flow]:
    """Yield the way of a parameter through a step.

    Args:
        parameter: of the plan.

    Yields:
        Its flows.
    """
    shape, moves = parameter.assignment.shape, parameter.moves
    # The backward comes to the end of the model before FSDP does.
    is_early = parameter.block == "" and moves.value.source != moves.value.target
    yield Flow(FORWARD, moves.value, shape)
    yield Flow(BACKWARD, Move(moves.stored, moves.value.target) if is_early else moves.value, shape)
    yield Flow(GRADIENTS, moves.gradient, shape)
    if parameter.block is not None:
        gather = Move(moves.stored, moves.value.source)
        yield Flow(FORWARD, gather, shape, parameter.block)
        yield Flow(BACKWARD, gather, shape, parameter.block)
        yield Flow(GRADIENTS, Move(moves.gradient.target, moves.stored), shape, parameter.block)


def kept_for_backward(plan: Plan, batch_size: int, sequence_length: int) -> Iterator[tuple[str, Activation]]:
    """Yield what a rank keeps from its forward to its backward.

    Args:
        plan: of the model.
        batch_size: sequences of a step, over all ranks.
        sequence_length: their tokens.

    Yields:
        The path of the module that says so, and the tensor with its local shape.

    Raises:
        ValueError: if the axes that spread the tokens do not divide them.
    """
    for axes, length, owner in (
        (plan.tokens.batch_axes, batch_size, "batch_size"),
        (plan.tokens.length_axes, sequence_length, "sequence_length"),
    ):
        if length % plan.mesh.size(*axes):
            product = " * ".join(f"{axis}={plan.mesh.size(axis)}" for axis in axes)
            raise ValueError(f"{owner} ({length}) must be divisible by {product}, over which it is spread")
    for path, module in plan.modules.items():
        if hasattr(module, "kept_for_backward"):
            for activation in module.kept_for_backward(batch_size, sequence_length).values():
                yield path, activation._replace(shape=_local_shape(plan, module, activation))


def _local_shape(plan: Plan, module: nn.Module, activation: Activation) -> tuple[int, ...]:
    """Tokens stay on their rank, whichever experts they are routed to."""
    axes_of = {
        "activation_batch": plan.tokens.batch_axes,
        "activation_batch_moe": plan.tokens.batch_axes,
        "activation_length": plan.tokens.length_axes,
        "activation_length_moe": plan.tokens.length_axes,
    }
    for name in ("activation_heads", "activation_kv_heads", "activation_mlp"):
        axes_of[name] = plan.kept.get(module, ())
    return tuple(
        length // plan.mesh.size(*axes_of.get(name or "", ()))
        for length, name in zip(activation.shape, activation.names, strict=True)
    )


def activation_flows(plan: Plan, batch_size: int, sequence_length: int) -> Iterator[Flow]:
    """Yield what moves of the tokens: sums over kept axes, keys and values of cut sequences.

    Args:
        plan: of the model.
        batch_size: sequences of a step, over all ranks.
        sequence_length: their tokens.

    Yields:
        The flows of a step.
    """
    batch = batch_size // plan.mesh.size(*plan.tokens.batch_axes)
    length = sequence_length // plan.mesh.size(*plan.tokens.length_axes)
    for unit, kept in plan.kept.items():
        if kept:
            shape = (batch, length, _embed(plan, unit))
            yield from _both_ways(plan, "sums of parts", plan.paths[unit], take_sum(3, kept), take_sum(3, kept), shape)
    for path, activation in kept_for_backward(plan, batch_size, sequence_length):
        if "activation_kv_length" in activation.names and plan.tokens.length_axes:
            dims = len(activation.names)
            moves = plan.tokens.sequence_moves(dims, activation.names.index("activation_kv_length"))
            yield from _both_ways(plan, "keys and values", path, *moves, activation.shape)


def _both_ways(
    plan: Plan, purpose: str, path: str, value: Move, gradient: Move, shape: tuple[int, ...]
) -> Iterator[Flow]:
    yield Flow(f"{purpose}, forward", value, shape)
    yield Flow(f"{purpose}, backward", gradient, shape)
    if plan.recomputed(path) is not None:
        yield Flow(f"{purpose}, backward", value, shape)


def _embed(plan: Plan, unit: nn.Module) -> int:
    """The width of the input and the output of a module with kept axes: the dim "embed" of its weights."""
    assignment = plan.parameters[next(iter(plan.units[unit].values()))].assignment
    return assignment.shape[(assignment.names or ()).index("embed")]
