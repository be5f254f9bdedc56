"""The collectives of a training step, and the bytes that they carry: the plan of `parallelize`, with sizes."""

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import nn

from maxmoe.parallel.plan import ParameterPlan, Plan, ResidualPart
from maxmoe.planning.saved_tensors import declared_tensors, local_tokens
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.redistribute import embed_sharding, redistribution_steps, summed

FORWARD, BACKWARD, GRADIENTS = "weights, forward", "weights, backward", "gradients of weights"


class Collective(NamedTuple):
    """One collective over one axis, or over several at once.

    Args:
        kind: "all-gather", "reduce-scatter", "all-reduce" or "all-to-all".
        axis: of the mesh; "context, expert" for the ranks along both.
        bytes: that each rank receives, and as many that it sends, along a ring of n ranks: (n - 1) / n of the gathered
            tensor, the same of the tensor before a reduce-scatter, both for an all-reduce, and (n - 1) / n of the
            tensor that is sent in an all-to-all to whose ranks as many rows go.
    """

    kind: str
    axis: str
    bytes: int


class Communication(Protocol):
    """A tensor that moves in a training step."""

    @property
    def purpose(self) -> str:
        """What the tensor is, and whether in the forward or in the backward."""
        ...

    @property
    def bucket(self) -> str | None:
        """Communications of one bucket share their collectives; None for one with its own."""
        ...

    def collectives(self, dtype: torch.dtype) -> Iterator[Collective]:
        """List its collectives.

        Args:
            dtype: of the parameters.

        Returns:
            One after the other; a slice is none.
        """
        ...


class Redistribution(NamedTuple):
    """The `Communication` of a tensor that is redistributed, by one collective over one axis after the other.

    Args:
        purpose: see `Communication`.
        source: before.
        target: after.
        shape: of the tensor over all ranks that the two shard it over.
        bucket: see `Communication`.
        dtype: None for that of the parameters.
    """

    purpose: str
    source: NamedSharding
    target: NamedSharding
    shape: tuple[int, ...]
    bucket: str | None = None
    dtype: torch.dtype | None = None

    def collectives(self, dtype: torch.dtype) -> Iterator[Collective]:
        """See `Communication`."""
        mesh, before, itemsize = self.source.mesh, self.source, (self.dtype or dtype).itemsize
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


class RowCommunication(NamedTuple):
    """The `Communication` of rows in one collective, over all of its axes at once.

    Args:
        purpose: see `Communication`.
        kind: of the collective.
        mesh: of the ranks.
        axes: of the group.
        shape: of the gathered tensor, of that before a reduce-scatter, of that which a rank sends in an all-to-all.
        dtype: None for that of the parameters.
    """

    purpose: str
    kind: str
    mesh: Mesh
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    @property
    def bucket(self) -> None:
        """See `Communication`."""
        return

    def collectives(self, dtype: torch.dtype) -> Iterator[Collective]:
        """See `Communication`."""
        num_ranks, num_bytes = self.mesh.size(*self.axes), math.prod(self.shape) * (self.dtype or dtype).itemsize
        label = ", ".join(axis for axis in self.mesh.axes if axis in self.axes)
        yield Collective(self.kind, label, num_bytes * (num_ranks - 1) // num_ranks)


def _axes(sharding: NamedSharding) -> set[str]:
    return {axis for axes in sharding.spec for axis in axes}


def parameter_communication(parameter: ParameterPlan, num_calls: int = 1) -> Iterator[Redistribution]:
    """List the communication of a parameter and its gradient in a step.

    Args:
        parameter: of the plan.
        num_calls: of its FSDP unit in a forward.

    Yields:
        That of its FSDP unit, then that of FSDP.
    """
    shape, block = parameter.parameter.shape, parameter.fsdp_block
    # The whole model as a FSDP unit refills its parameters before FSDP has gathered them: see parameter_hooks.py.
    is_refilled_first = block == parameter.fsdp_unit == "" and parameter.is_gathered
    refill_source = parameter.stored if is_refilled_first else parameter.unsharded
    for _ in range(num_calls):
        yield Redistribution(FORWARD, parameter.unsharded, parameter.used, shape)
        yield Redistribution(BACKWARD, refill_source, parameter.used, shape)
        yield Redistribution(GRADIENTS, parameter.grad_used, parameter.grad_unsharded, shape)
    if block is not None:
        yield Redistribution(FORWARD, parameter.stored, parameter.unsharded, shape, block)
        yield Redistribution(BACKWARD, parameter.stored, parameter.unsharded, shape, block)
        yield Redistribution(GRADIENTS, parameter.grad_unsharded, parameter.stored, shape, block)


def activation_communication(plan: Plan, batch_size: int, sequence_length: int) -> Iterator[Communication]:
    """List the communication of activations: all-reduces of tensor parallelism, keys and values of sharded sequences.

    That of Mixture-of-Experts layers is in `dispatch_communication`.

    Args:
        plan: of the model.
        batch_size: sequences of a step, over all ranks.
        sequence_length: their tokens.

    Yields:
        Those of a step.
    """
    batch, length = local_tokens(plan, batch_size, sequence_length)
    writers = {part.writer for part in plan.residual_parts}
    for unit, axes in plan.tensor_parallel_axes.items():
        if axes and unit not in plan.reduced_by_layer and plan.paths[unit] not in writers:
            shape = (batch, length, _hidden_size(plan, unit))
            reduced = summed(plan.mesh, 3, axes)
            yield from _both_ways(plan, "partial outputs", plan.paths[unit], reduced, reduced, shape)
    for part in plan.residual_parts:
        yield from _residual_communication(plan, part, (batch, length, part.hidden_size))
    for path, tensor in declared_tensors(plan, batch_size, sequence_length):
        if "activation_kv_length" in tensor.names and plan.tokens.length_axes:
            sharded, gathered, partial = plan.tokens.sequence_shardings(
                len(tensor.names), tensor.names.index("activation_kv_length")
            )
            yield from _both_ways(plan, "keys and values", path, (sharded, gathered), (partial, sharded), tensor.shape)


def _residual_communication(plan: Plan, part: ResidualPart, shape: tuple[int, ...]) -> Iterator[Communication]:
    """List that of a reader and a writer of a sharded residual stream, but for a Mixture-of-Experts layer's own."""

    def partial(axes: tuple[str, ...]) -> NamedSharding:
        return NamedSharding.replicated(plan.mesh, 3, partial=axes)

    outside, whole = embed_sharding(plan.mesh, 3, part.axes), partial(())
    if part.reader is not None:
        gradient = partial(part.partial_axes), outside
        yield from _both_ways(plan, "hidden states", part.reader, (outside, whole), gradient, shape)
    if part.writer is not None and part.writer not in plan.dispatch_plans:
        parallel = plan.tensor_parallel_axes.get(plan.modules[part.writer], ())
        outputs = partial(parallel), outside
        yield from _both_ways(plan, "partial outputs", part.writer, outputs, (outside, whole), shape)
        if part.reader is not None:
            yield Redistribution("partial outputs, backward", partial(parallel), partial(part.axes), shape)


def _both_ways(
    plan: Plan,
    purpose: str,
    path: str,
    value: tuple[NamedSharding, NamedSharding],
    gradient: tuple[NamedSharding, NamedSharding],
    shape: tuple[int, ...],
) -> Iterator[Communication]:
    yield Redistribution(f"{purpose}, forward", *value, shape)
    yield Redistribution(f"{purpose}, backward", *gradient, shape)
    recomputed = plan.recomputed_by(path)
    # A recomputation ends when it has what the backward needs: before the sum of the module's own partial outputs.
    if recomputed is not None and not (purpose == "partial outputs" and recomputed == path):
        yield Redistribution(f"{purpose}, backward", *value, shape)


def _hidden_size(plan: Plan, unit: nn.Module) -> int:
    """The width of the input and the output of a tensor-parallel module: the dim "embed" of its weights."""
    parameter = plan.parameters[next(iter(plan.fsdp_units[unit].values()))].parameter
    return parameter.shape[(parameter.names or ()).index("embed")]
