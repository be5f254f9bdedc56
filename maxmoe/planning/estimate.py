"""Memory per rank and bytes communicated per training step, without running a step."""

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
from maxmoe.planning.explain import plan_without_warnings
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
    """Result of `estimate`. As a string, two tables as wide as the terminal.

    Args:
        memory: bytes per rank at the beginning of the backward, by purpose. "activations" are saved from the forward
            to the backward; "recomputed activations" are those of the module with the most.
        traffic: collectives per step, without the all-reduces of losses, statistics and the gradient norm.
    """

    memory: dict[str, int]
    traffic: tuple[Traffic, ...]

    def __str__(self) -> str:
        lines = [(name, readable_bytes(count)) for name, count in self.memory.items()]
        memory = [("memory per rank", "bytes"), *lines, ("total", readable_bytes(sum(self.memory.values())))]
        traffic = [("collectives per step", "kind", "axis", "times", "bytes sent per rank")]
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
    """Estimate the memory per rank and the communication per training step of a module on a mesh.

    Gradients and optimizer state have the dtype of the parameters, as in `torch.optim`. AdamW keeps two elements per
    parameter element and does not communicate. Muon keeps one for the parameters that `maxmoe.optim.parameter_groups`
    assigns to it, and communicates sharded matrices in its default dtype on the device of the parameters.

    Every weight is counted as gathered in the forward and again in the backward; an untied embedding is gathered in
    the forward only. Only one recomputed module (see `maxmoe.set_recompute`) is in memory at a time. Routing is assumed
    to be balanced: every expert gets equally many tokens from every rank.

    Args:
        module: module before `maxmoe.parallelize`, on any device, including meta, with parameters of one dtype.
        mesh: mesh of real or planned ranks.
        rules: table of rules, or the name of a preset.
        batch_size: number of sequences per step, over all ranks.
        sequence_length: number of tokens per sequence.
        optimizer: optimizer whose state and collectives are counted.
        dispatch: strategy for experts on other ranks, as for `maxmoe.parallelize`.
        num_chunks: number of chunks of the tokens of a MoE layer.
        allow_unused: accept rules and mesh axes without effect.

    Raises:
        ValueError: as `parameter_shardings`; for parameters of several dtypes; if axes that shard the tokens do not
            divide them.
    """
    rules = LogicalRules.load(rules)
    plan = plan_without_warnings(module, mesh, rules, dispatch, num_chunks, allow_unused)
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
        "gradients": sum(stored),
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
    """Return the module whose backward recomputes a tensor that the module at `path` saves; None if it is kept."""
    _, *around = enclosing(path)
    outer = next((outer for outer in around if plan[outer].is_recomputed), None)
    return outer if outer is not None or tensor.is_kept else path


def _largest(parts: Iterable[tuple[str | None, int]]) -> int:
    """Return the bytes for the whole step (None) plus those of the largest module: modules run one at a time."""
    totals: dict[str | None, int] = defaultdict(int)
    for block, count in parts:
        totals[block] += count
    return totals.pop(None, 0) + max(totals.values(), default=0)


def _gathered(parameter: ParameterPlan) -> Iterator[tuple[str | None, int]]:
    """Yield the bytes of each gathered copy of a parameter, with the module that frees it; None for the whole step."""
    if parameter.fsdp_block is not None:
        yield parameter.fsdp_block or None, parameter.bytes(parameter.unsharded)
    if parameter.is_gathered:
        yield parameter.fsdp_unit or None, parameter.bytes(parameter.used)
