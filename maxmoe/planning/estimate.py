"""The memory of a rank and the bytes that it exchanges in a training step, without running any."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from maxmoe.nn import SavedTensor
from maxmoe.optim.newton_schulz import fast_dtype
from maxmoe.optim.parameter_groups import choose
from maxmoe.parallel.dispatch_plan import Dispatch
from maxmoe.parallel.plan import ParameterPlan, Plan, enclosing
from maxmoe.planning.communication import activation_communication, dispatch_communication, parameter_communication
from maxmoe.planning.explain import quiet_plan
from maxmoe.planning.optimizer_communication import muon_communication
from maxmoe.planning.saved_tensors import saved_tensors
from maxmoe.planning.traffic import Traffic, traffic_of
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.planned_collective import PlannedCollective
from maxmoe.sharding.rules import LogicalRules
from maxmoe.text_table import readable_bytes, terminal_width, text_table

Optimizer = Literal["adamw", "muon"]


@dataclass(frozen=True)
class Estimate:
    """What `estimate` returns; as a string, two tables as wide as the terminal.

    Args:
        memory: bytes of a rank at the beginning of the backward, by what they are for. "activations" are kept from
            the forward to the backward; "recomputed activations" are those of the module that has most of them.
        traffic: of a rank in one step, without the all-reduces of losses, statistics and the norm of the gradients.
    """

    memory: dict[str, int]
    traffic: tuple[Traffic, ...]

    def __str__(self) -> str:
        lines = [(name, readable_bytes(count)) for name, count in self.memory.items()]
        memory = [("memory of a rank", "bytes"), *lines, ("total", readable_bytes(sum(self.memory.values())))]
        traffic = [("collectives of a step", "kind", "axis", "times", "bytes sent, and received, by a rank")]
        traffic += [row.cells for row in self.traffic]
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
    dispatch: Dispatch = "auto",
    num_chunks: int = 1,
    allow_unused: bool = False,
) -> Estimate:
    """Estimate what a parallelized module needs: memory, and the collectives of a step.

    Gradients and the state of the optimizer have the dtype of the parameters, as in `torch.optim`. AdamW keeps two
    numbers per parameter, and has no collectives. Muon keeps one for the parameters that
    `maxmoe.optim.parameter_groups` gives to it, and exchanges the matrices that no rank holds whole, in the dtype that
    it takes on the device of the parameters.

    Every weight is gathered in the forward and again in the backward. An embedding that is not the output projection
    too is gathered in the forward only: it is counted twice all the same.

    What the module recomputes is that of `maxmoe.set_recompute`. Of a recomputed module there is one at a time.

    Routing is taken to be balanced: every expert gets as many tokens of every rank.

    Args:
        module: whose parameters have one dtype, on the meta device or elsewhere; not parallelized yet.
        mesh: planned or not.
        rules: the table, or the name of a preset.
        batch_size: sequences of a step, over all ranks.
        sequence_length: their tokens.
        optimizer: whose state is kept, and whose collectives are counted.
        dispatch: see `maxmoe.parallelize`.
        num_chunks: see `maxmoe.parallelize`.
        allow_unused: see `maxmoe.parallelize`.

    Returns:
        The estimate.

    Raises:
        ValueError: as `parameter_shardings`; for parameters of several dtypes; if axes that shard the tokens do not
            divide them.
    """
    rules = LogicalRules.load(rules)
    plan = quiet_plan(module, mesh, rules, dispatch=dispatch, num_chunks=num_chunks, allow_unused=allow_unused)
    parameters = list(plan.parameters.values())
    dtypes = {parameter.parameter.dtype for parameter in parameters}
    if len(dtypes) != 1:
        raise ValueError(f"the parameters must have one dtype, got {', '.join(map(str, dtypes)) or 'none'}")
    (dtype,) = dtypes
    stored = [parameter.bytes(parameter.stored) for parameter in parameters]
    choices = choose(module, {}) if optimizer == "muon" else ()
    matrices = {choice.name for choice in choices if choice.matrix is not None}
    states = [1 if name in matrices else 2 for name in plan.parameters]
    activations: dict[str | None, int] = defaultdict(int)
    for path, tensor in saved_tensors(plan, batch_size, sequence_length, num_chunks):
        count = math.prod(tensor.shape) * (tensor.dtype or dtype).itemsize
        activations[_recomputed_for(plan, path, tensor)] += count
    memory = {
        "parameters": sum(stored),
        "their gradients": sum(stored),
        f"state of {optimizer}": sum(size * count for size, count in zip(stored, states, strict=True)),
        "gathered parameters": _largest(part for parameter in parameters for part in _gathered(parameter)),
        "activations": activations.pop(None, 0),
        "recomputed activations": max(activations.values(), default=0),
    }
    communication: list[PlannedCollective] = []
    communication += parameter_communication(plan, num_chunks)
    communication += activation_communication(plan, batch_size, sequence_length, dtype)
    communication += (item for _, item in dispatch_communication(plan, batch_size, sequence_length, num_chunks))
    communication += muon_communication(plan, choices, fast_dtype(next(module.parameters()).device))
    return Estimate(memory, traffic_of(communication))


def _recomputed_for(plan: Plan, path: str, tensor: SavedTensor) -> str | None:
    """Return the module whose backward computes a tensor again that a module at a path saves; None if it is kept."""
    _, *around = enclosing(path)
    outer = next((outer for outer in around if plan[outer].is_recomputed), None)
    return outer if outer is not None or tensor.is_kept else path


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
        yield parameter.fsdp_unit or None, parameter.bytes(parameter.used)
