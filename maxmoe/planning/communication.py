"""The collectives of a training step, and the bytes that they carry: the plan of `parallelize`, with sizes."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from maxmoe.nn.declaration import SavedTensor, declaration_of
from maxmoe.parallel.plan import ParameterPlan, Plan
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.redistribute import redistribution_steps, summed

FORWARD, BACKWARD, GRADIENTS = "weights, forward", "weights, backward", "gradients of weights"


class Collective(NamedTuple):
    """One collective over one axis.

    Args:
        kind: "all-gather", "reduce-scatter" or "all-reduce".
        axis: of the mesh.
        bytes: that each rank receives, and as many that it sends, along a ring of n ranks: (n - 1) / n of the gathered
            tensor, the same of the tensor before a reduce-scatter, and both for an all-reduce.
    """

    kind: str
    axis: str
    bytes: int


class Communication(NamedTuple):
    """A tensor that is redistributed in a training step.

    Args:
        purpose: what the tensor is, and whether in the forward or in the backward.
        source: before.
        target: after.
        shape: of the tensor over all ranks that the two shard it over.
        bucket: communications of one bucket share their collectives; None for one with its own.
    """

    purpose: str
    source: NamedSharding
    target: NamedSharding
    shape: tuple[int, ...]
    bucket: str | None = None

    def collectives(self, itemsize: int) -> Iterator[Collective]:
        """List its collectives.

        Args:
            itemsize: bytes of an element.

        Yields:
            One for each step of the redistribution that communicates; a slice is none.
        """
        mesh, before = self.source.mesh, self.source
        for after in redistribution_steps(self.source, self.target):
            gathered = _axes(before) - _axes(after)
            reduced = set(before.partial) - set(after.partial)
            scattered = (_axes(after) - _axes(before)) & reduced
            larger = after if gathered else before
            num_bytes = math.prod(self.shape) // mesh.size(*_axes(larger)) * itemsize
            for kind, axes, passes in (
                ("all-gather", gathered, 1),
                ("reduce-scatter", scattered, 1),
                ("all-reduce", reduced - scattered, 2),
            ):
                for axis in axes:
                    yield Collective(kind, axis, passes * num_bytes * (mesh.size(axis) - 1) // mesh.size(axis))
            before = after


def _axes(sharding: NamedSharding) -> set[str]:
    return {axis for axes in sharding.spec for axis in axes}


def parameter_communication(parameter: ParameterPlan) -> Iterator[Communication]:
    """List the communication of a parameter and its gradient in a step.

    Args:
        parameter: of the plan.

    Yields:
        That of its gather unit, then that of FSDP.
    """
    shape, block = parameter.parameter.shape, parameter.fsdp_block
    # Outside of blocks, the gather unit refills its parameters before FSDP has gathered them: see parameter_hooks.py.
    refill_source = parameter.stored if block == "" and parameter.is_gathered else parameter.unsharded
    yield Communication(FORWARD, parameter.unsharded, parameter.used, shape)
    yield Communication(BACKWARD, refill_source, parameter.used, shape)
    yield Communication(GRADIENTS, parameter.grad_used, parameter.grad_unsharded, shape)
    if block is not None:
        yield Communication(FORWARD, parameter.stored, parameter.unsharded, shape, block)
        yield Communication(BACKWARD, parameter.stored, parameter.unsharded, shape, block)
        yield Communication(GRADIENTS, parameter.grad_unsharded, parameter.stored, shape, block)


def saved_tensors(plan: Plan, batch_size: int, sequence_length: int) -> Iterator[tuple[str, SavedTensor]]:
    """List the tensors that autograd saves on a rank.

    Args:
        plan: of the model.
        batch_size: sequences of a step, over all ranks.
        sequence_length: their tokens.

    Yields:
        The path of the module that declares it, and the tensor with its local shape.

    Raises:
        ValueError: if the axes that shard the tokens do not divide them.
    """
    for axes, length, argument in (
        (plan.tokens.batch_axes, batch_size, "batch_size"),
        (plan.tokens.length_axes, sequence_length, "sequence_length"),
    ):
        if length % plan.mesh.size(*axes):
            product = " * ".join(f"{axis}={plan.mesh.size(axis)}" for axis in axes)
            raise ValueError(f"{argument} ({length}) must be divisible by {product}, over which it is sharded")
    for path, module in plan.modules.items():
        declared = declaration_of(module).saved_tensors
        for tensor in declared(batch_size, sequence_length).values() if declared else ():
            yield path, tensor._replace(shape=_local_shape(plan, module, tensor))


def _local_shape(plan: Plan, module: nn.Module, tensor: SavedTensor) -> tuple[int, ...]:
    """Tokens stay on their rank, whichever experts they are routed to: no axis shards the dim of the experts."""
    axes_of = {
        "activation_batch": plan.tokens.batch_axes,
        "activation_batch_moe": plan.tokens.batch_axes,
        "activation_length": plan.tokens.length_axes,
        "activation_length_moe": plan.tokens.length_axes,
    }
    for name in ("activation_heads", "activation_kv_heads", "activation_mlp"):
        axes_of[name] = plan.tensor_parallel_axes.get(module, ())
    return tuple(
        length // plan.mesh.size(*axes_of.get(name or "", ()))
        for length, name in zip(tensor.shape, tensor.names, strict=True)
    )


def activation_communication(plan: Plan, batch_size: int, sequence_length: int) -> Iterator[Communication]:
    """List the communication of activations: all-reduces of tensor parallelism, keys and values of sharded sequences.

    Args:
        plan: of the model.
        batch_size: sequences of a step, over all ranks.
        sequence_length: their tokens.

    Yields:
        Those of a step.
    """
    batch = batch_size // plan.mesh.size(*plan.tokens.batch_axes)
    length = sequence_length // plan.mesh.size(*plan.tokens.length_axes)
    for unit, axes in plan.tensor_parallel_axes.items():
        if axes:
            shape = (batch, length, _hidden_size(plan, unit))
            reduced = summed(plan.mesh, 3, axes)
            yield from _both_ways(plan, "partial outputs", plan.paths[unit], reduced, reduced, shape)
    for path, tensor in saved_tensors(plan, batch_size, sequence_length):
        if "activation_kv_length" in tensor.names and plan.tokens.length_axes:
            sharded, gathered, partial = plan.tokens.sequence_shardings(
                len(tensor.names), tensor.names.index("activation_kv_length")
            )
            yield from _both_ways(plan, "keys and values", path, (sharded, gathered), (partial, sharded), tensor.shape)


def _both_ways(
    plan: Plan,
    purpose: str,
    path: str,
    value: tuple[NamedSharding, NamedSharding],
    gradient: tuple[NamedSharding, NamedSharding],
    shape: tuple[int, ...],
) -> Iterator[Communication]:
    yield Communication(f"{purpose}, forward", *value, shape)
    yield Communication(f"{purpose}, backward", *gradient, shape)
    if plan.recomputed_by(path) is not None:
        yield Communication(f"{purpose}, backward", *value, shape)


def _hidden_size(plan: Plan, unit: nn.Module) -> int:
    """The width of the input and the output of a tensor-parallel module: the dim "embed" of its weights."""
    parameter = plan.parameters[next(iter(plan.gather_units[unit].values()))].parameter
    return parameter.shape[(parameter.names or ()).index("embed")]
