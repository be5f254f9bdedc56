"""The memory of a rank and the bytes that it exchanges in a training step, without running any."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

from maxmoe.parallel.plan import ParameterPlan
from maxmoe.planning.communication import (
    Communication,
    activation_communication,
    parameter_communication,
    saved_tensors,
)
from maxmoe.planning.explain import quiet_plan
from maxmoe.planning.text_table import readable_bytes, terminal_width, text_table
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.rules import LogicalRules

Optimizer = Literal["adamw", "muon"]


class Traffic(NamedTuple):
    """Collectives of one kind over one axis, in one step.

    Args:
        purpose: of which tensors, and whether in the forward or in the backward.
        kind: "all-gather", "reduce-scatter" or "all-reduce".
        axis: of the mesh.
        times: how many there are.
        bytes: that a rank sends in all of them, and receives; see `Collective`.
    """

    purpose: str
    kind: str
    axis: str
    times: int
    bytes: int


@dataclass(frozen=True)
class Estimate:
    """What `estimate` returns; as a string, two tables as wide as the terminal.

    Args:
        memory: bytes of a rank at the beginning of the backward, by what they are for.
        traffic: of a rank in one step, without the all-reduces of losses and statistics and those of the optimizer.
    """

    memory: dict[str, int]
    traffic: tuple[Traffic, ...]

    def __str__(self) -> str:
        lines = [(name, readable_bytes(count)) for name, count in self.memory.items()]
        memory = [("memory of a rank", "bytes"), *lines, ("total", readable_bytes(sum(self.memory.values())))]
        traffic = [("collectives of a step", "kind", "axis", "times", "bytes sent, and received, by a rank")]
        traffic += [
            (row.purpose, row.kind, row.axis, str(row.times), readable_bytes(row.bytes)) for row in self.traffic
        ]
        total = readable_bytes(sum(row.bytes for row in self.traffic))
        traffic.append(("total", "", "", str(sum(row.times for row in self.traffic)), total))
        width = terminal_width()
        return f"{text_table(memory, right=[1], width=width)}\n\n{text_table(traffic, right=[3, 4], width=width)}"


def estimate(
    module: nn.Module,
    mesh: Mesh,
    rules: LogicalRules | str = "default",
    *,
    batch_size: int,
    sequence_length: int,
    optimizer: Optimizer = "adamw",
    allow_unused: bool = False,
) -> Estimate:
    """Estimate what a parallelized module needs: memory, and the collectives of one forward and backward.

    Gradients and the state of the optimizer have the dtype of the parameters, as in `torch.optim`. AdamW keeps two
    numbers per parameter. Muon keeps one for matrices and stacks of them, but for those of the vocabulary, which have
    two like everything else; the gathers of its orthogonalisation are not counted.

    Every weight is gathered in the forward and again in the backward. An embedding that is not the output projection
    too is gathered in the forward only: it is counted twice all the same.

    Args:
        module: whose parameters have one dtype, on the meta device or elsewhere; not parallelized yet.
        mesh: planned or not.
        rules: the table, or the name of a preset.
        batch_size: sequences of a step, over all ranks.
        sequence_length: their tokens.
        optimizer: which state is kept.
        allow_unused: see `maxmoe.parallelize`.

    Returns:
        The estimate.

    Raises:
        ValueError: as `parameter_shardings`; for parameters of several dtypes; if axes that shard the tokens do not
            divide them.
    """
    plan = quiet_plan(module, mesh, LogicalRules.load(rules), allow_unused=allow_unused)
    parameters = list(plan.parameters.values())
    dtypes = {parameter.parameter.dtype for parameter in parameters}
    if len(dtypes) != 1:
        raise ValueError(f"the parameters must have one dtype, got {', '.join(map(str, dtypes)) or 'none'}")
    (dtype,) = dtypes
    stored = [parameter.bytes(parameter.stored) for parameter in parameters]
    states = [_num_states(parameter, optimizer) for parameter in parameters]
    activations = [
        (plan.recomputed_by(path), math.prod(tensor.shape) * (tensor.dtype or dtype).itemsize)
        for path, tensor in saved_tensors(plan, batch_size, sequence_length)
    ]
    memory = {
        "parameters": sum(stored),
        "their gradients": sum(stored),
        f"state of {optimizer}": sum(size * count for size, count in zip(stored, states, strict=True)),
        "gathered parameters": _largest(part for parameter in parameters for part in _gathered(parameter)),
        "activations": _largest(activations),
    }
    communication = [item for parameter in parameters for item in parameter_communication(parameter)]
    communication += activation_communication(plan, batch_size, sequence_length)
    return Estimate(memory, _traffic(communication, dtype.itemsize))


def _num_states(parameter: ParameterPlan, optimizer: Optimizer) -> int:
    """Elements of optimizer state for each element of a parameter."""
    names, shape = parameter.parameter.names or (), parameter.parameter.shape
    return 1 if optimizer == "muon" and len(shape) > 1 and "vocab" not in names else 2


def _largest(parts: Iterable[tuple[str | None, int]]) -> int:
    """Add the bytes that last (None) to those of the largest module, of which there is one at a time."""
    totals: dict[str | None, int] = defaultdict(int)
    for block, count in parts:
        totals[block] += count
    return totals.pop(None, 0) + max(totals.values(), default=0)


def _gathered(parameter: ParameterPlan) -> Iterator[tuple[str | None, int]]:
    """Gathered copies of a parameter, each for as long as the module runs that has gathered it."""
    if parameter.fsdp_block is not None:
        yield parameter.fsdp_block or None, parameter.bytes(parameter.unsharded)
    if parameter.is_gathered:
        yield parameter.gather_unit or None, parameter.bytes(parameter.used)


def _traffic(communication: Iterable[Communication], itemsize: int) -> tuple[Traffic, ...]:
    total: dict[tuple[str, str, str], list[int]] = {}
    buckets = set()
    for item in communication:
        for collective in item.collectives(itemsize):
            key = (item.purpose, collective.kind, collective.axis)
            counted = total.setdefault(key, [0, 0])
            if item.bucket is None or (key, item.bucket) not in buckets:
                counted[0] += 1
                buckets.add((key, item.bucket))
            counted[1] += collective.bytes
    return tuple(Traffic(*key, times, num_bytes) for key, (times, num_bytes) in sorted(total.items()))
