"""The memory of a rank and the bytes that it exchanges in a training step, without running any."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

from maxmoe.sharding.collectives import collectives
from maxmoe.sharding.explain import explain
from maxmoe.sharding.flows import Flow, activation_flows, kept_for_backward, parameter_flows
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.movement import Layout
from maxmoe.sharding.plan import Plan, PlannedParameter
from maxmoe.sharding.rules import LogicalRules
from maxmoe.sharding.text_table import readable_bytes, text_table

Optimizer = Literal["adamw", "muon"]


class Traffic(NamedTuple):
    """Collectives of one kind over one axis, in one step.

    Args:
        purpose: what is moved, and when.
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
    """What `estimate` returns; as a string, two tables.

    Args:
        memory: bytes of a rank at the beginning of the backward, by what they are for.
        traffic: of a rank in one step. Sums of losses and statistics, and what the optimizer moves, are left out.
    """

    memory: dict[str, int]
    traffic: tuple[Traffic, ...]

    def __str__(self) -> str:
        lines = [(name, readable_bytes(count)) for name, count in self.memory.items()]
        memory = [("memory of a rank", "bytes"), *lines, ("together", readable_bytes(sum(self.memory.values())))]
        traffic = [("collectives of a step", "kind", "axis", "times", "bytes sent, and received, by a rank")]
        traffic += [
            (flow.purpose, flow.kind, flow.axis, str(flow.times), readable_bytes(flow.bytes)) for flow in self.traffic
        ]
        total = readable_bytes(sum(flow.bytes for flow in self.traffic))
        traffic.append(("together", "", "", str(sum(flow.times for flow in self.traffic)), total))
        return f"{text_table(memory, right=[1])}\n\n{text_table(traffic, right=[3, 4])}"


def estimate(
    module: nn.Module,
    mesh: Mesh,
    rules: LogicalRules | str,
    *,
    batch_size: int,
    sequence_length: int,
    optimizer: Optimizer = "adamw",
) -> Estimate:
    """Add up what `parallelize` makes of a module: memory, and the collectives of one forward and backward.

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

    Returns:
        The estimate.

    Raises:
        ValueError: as `assign`; for parameters of several dtypes; if axes that spread the tokens do not divide them.
    """
    rules = LogicalRules.load(rules)
    assignments = {parameter.name: parameter.assignment for parameter in explain(module, mesh, rules).parameters}
    dtypes = {assignment.dtype for assignment in assignments.values()}
    if len(dtypes) != 1:
        raise ValueError(f"the parameters must have one dtype, got {', '.join(map(str, dtypes)) or 'none'}")
    (dtype,) = dtypes
    plan = Plan(module, mesh, rules, assignments)
    parameters = list(plan.parameters.values())
    stored = [parameter.bytes(Layout(parameter.assignment.sharding.spec)) for parameter in parameters]
    states = [_num_states(parameter, optimizer) for parameter in parameters]
    activations = [
        (plan.recomputed(path), math.prod(activation.shape) * (activation.dtype or dtype).itemsize)
        for path, activation in kept_for_backward(plan, batch_size, sequence_length)
    ]
    memory = {
        "parameters": sum(stored),
        "their gradients": sum(stored),
        f"state of {optimizer}": sum(size * count for size, count in zip(stored, states, strict=True)),
        "gathered parameters": _largest(part for parameter in parameters for part in _gathered(parameter)),
        "activations": _largest(activations),
    }
    flows = [flow for parameter in parameters for flow in parameter_flows(parameter)]
    flows += activation_flows(plan, batch_size, sequence_length)
    return Estimate(memory, _traffic(flows, mesh, dtype.itemsize))


def _num_states(parameter: PlannedParameter, optimizer: Optimizer) -> int:
    """Numbers that the optimizer keeps for each number of a parameter."""
    names, shape = parameter.assignment.names or (), parameter.assignment.shape
    return 1 if optimizer == "muon" and len(shape) > 1 and "vocab" not in names else 2


def _largest(parts: Iterable[tuple[str | None, int]]) -> int:
    """Add up what lasts (None) and, of what is there for one module at a time, that of the largest."""
    totals: dict[str | None, int] = defaultdict(int)
    for block, count in parts:
        totals[block] += count
    return totals.pop(None, 0) + max(totals.values(), default=0)


def _gathered(parameter: PlannedParameter) -> Iterator[tuple[str | None, int]]:
    """Whole parameters that a rank holds for as long as the module runs that has gathered them."""
    value = parameter.moves.value
    if parameter.block is not None:
        yield parameter.block or None, parameter.bytes(value.source)
    if value.source != value.target:
        yield parameter.unit or None, parameter.bytes(value.target)


def _traffic(flows: Iterable[Flow], mesh: Mesh, itemsize: int) -> tuple[Traffic, ...]:
    total: dict[tuple[str, str, str], list[int]] = {}
    buckets = set()
    for flow in flows:
        for collective in collectives(flow.move, mesh, flow.shape, itemsize):
            key = (flow.purpose, collective.kind, collective.axis)
            counted = total.setdefault(key, [0, 0])
            if flow.bucket is None or (key, flow.bucket) not in buckets:
                counted[0] += 1
                buckets.add((key, flow.bucket))
            counted[1] += collective.bytes
    return tuple(Traffic(*key, times, num_bytes) for key, (times, num_bytes) in sorted(total.items()))
