"""Bytes that a rank holds of parameters, gradients, optimizer state and activations."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from maxmoe.parallel.plan.plan import Plan, enclosing
from maxmoe.pipelining.fsdp_gathers import NUM_AHEAD
from maxmoe.planning.planned_batch import PlannedBatch


@dataclass(frozen=True, kw_only=True)
class StateDtypes:
    """Dtypes in which a rank stores gradients, master weights and moments.

    By default those of mixed-precision training. An optimizer of torch that is given bfloat16 parameters keeps moments
    of the same dtype, and no master weights::

        StateDtypes(master=torch.bfloat16, moments=torch.bfloat16)

    Args:
        gradients: dtype of the gradients; None for the dtype of the parameters, which collectives have in any case.
        master: dtype of the master weights, float32 by default. Only narrower parameters have master weights.
        moments: dtype of the moments of the optimizer; None for float32, or the dtype of the parameters if it is wider.
    """

    gradients: torch.dtype | None = None
    master: torch.dtype = torch.float32
    moments: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("gradients", "master", "moments"):
            dtype = getattr(self, name)
            if dtype is None and name != "master":
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"{name} must be a floating-point dtype, got {dtype!r}")

    def of_parameters(self, parameters: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtypes of gradients, moments and master weights, if there are any, for parameters of a dtype."""
        wide = max(parameters, torch.float32, key=lambda dtype: dtype.itemsize)
        dtypes = {"gradients": self.gradients or parameters, "moments": self.moments or wide}
        return dtypes | ({"master weights": self.master} if self.master.itemsize > parameters.itemsize else {})


MIXED_PRECISION = StateDtypes()


def parameter_dtype(plan: Plan) -> torch.dtype:
    """Return the dtype of parameters and activations; raises a ValueError if the parameters have several.

    Beside frozen parameters, those that are trained may have another dtype: adapters do. Quantized weights count with
    the dtype in which modules compute with them.
    """
    frozen = [parameter for parameter in plan.parameters.values() if not parameter.is_trained]
    first = {
        parameter.parameter.used_dtype: parameter.name for parameter in reversed(frozen or [*plan.parameters.values()])
    }
    if len(first) != 1:
        found = " and ".join(f"{dtype} of {name}" for dtype, name in first.items())
        raise ValueError(f"the parameters must have one dtype, got {found or 'no parameters'}")
    return next(iter(first))


def stored_memory(plan: Plan, optimizer: str, matrices: Collection[str], dtypes: StateDtypes) -> dict[str, int]:
    """Count parameters, gradients and optimizer state; `matrices` are the names of those with one state element."""
    memory = defaultdict(int, dict.fromkeys(("parameters", "gradients", f"state of {optimizer}"), 0))
    for name, parameter in plan.parameters.items():
        own, stored = parameter.parameter.dtype, parameter.local_bytes
        memory["parameters"] += stored
        for purpose, dtype in dtypes.of_parameters(own).items() if parameter.is_trained else ():
            num_bytes = stored // own.itemsize * dtype.itemsize
            if purpose == "moments":
                memory[f"state of {optimizer}"] += num_bytes * (1 if name in matrices else 2)
            else:
                memory[purpose] += num_bytes
    return memory


class PartMemory(NamedTuple):
    """Bytes of the parameters of a part of a model, such as a block or a stage."""

    state: Mapping[str, int]  # parameters, gradients and optimizer state, by purpose
    unsharded: int  # parameters that FSDP2 manages, before it has sharded them
    gathered: int  # parameters of the model itself, which are gathered for the whole step
    largest: int  # gathered parameters of the module with the most: modules run one at a time


def part_memory(plan: Plan, state: Mapping[str, int], *, has_stages: bool) -> PartMemory:
    """Count the parameters of a part, given its `stored_memory`; FSDP2 gathers stages whole."""
    parameters = plan.parameters.values()
    managed = [(each.fsdp_block, each.bytes(each.unsharded)) for each in parameters if each.fsdp_block is not None]
    by_units = [(each.fsdp_unit, each.bytes(each.used)) for each in parameters if each.is_gathered]
    of_modules: dict[str, int] = defaultdict(int)
    for module, count in by_units if has_stages else [*managed, *by_units]:
        of_modules[module] += count
    gathered = of_modules.pop("", 0)
    return PartMemory(state, sum(count for _, count in managed), gathered, max(of_modules.values(), default=0))


def rank_memory(
    stages: Sequence[Sequence[PartMemory]], activations: int, recomputed: int, unsharded_gradients: int | None
) -> dict[str, int]:
    """Count the bytes of a rank by purpose, when the micro-batches in flight take the most.

    With stages, torch gathers the parameters of all stages of a rank before it frees them, and keeps the gradients of
    whole parameters until the last backward of a stage, also where FSDP2 would reduce them after each backward.
    `stages` has the parts of each stage of the rank; `unsharded_gradients` is None without stages.
    """
    states = [part.state for stage in stages for part in stage]
    purposes = dict.fromkeys(purpose for state in states for purpose in state)
    memory = {purpose: sum(state.get(purpose, 0) for state in states) for purpose in purposes}
    gathered = max(sum(part.gathered for part in stage) + max(part.largest for part in stage) for stage in stages)
    if unsharded_gradients is not None:
        memory["unsharded gradients"] = unsharded_gradients
        gathered += sum(sorted(sum(part.unsharded for part in stage) for stage in stages)[-NUM_AHEAD:])
    return memory | {
        "gathered parameters": gathered,
        "activations": activations,
        "recomputed activations": recomputed,
    }


def activation_memory(batch: PlannedBatch) -> tuple[int, int]:
    """Count the activations that are kept until the backward, and the activations of the largest recomputed module."""
    activations = activation_sizes(batch)
    return activations.pop(None, 0), max(activations.values(), default=0)


def activation_sizes(batch: PlannedBatch) -> dict[str | None, int]:
    """Count the bytes of activations by the module whose backward recomputes them; None for those that are kept."""
    activations: dict[str | None, int] = defaultdict(int)
    for path, tensor in batch.saved_tensors():
        count = math.prod(tensor.shape) * (tensor.dtype or batch.dtype).itemsize
        _, *around = enclosing(path)
        outer = next((outer for outer in around if batch.plan[outer].is_recomputed), None)
        activations[outer if outer is not None or tensor.is_kept else path] += count
    return activations
