"""Bytes that a rank holds of parameters, gradients, optimizer state and activations."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch

from maxmoe.parallel.plan.plan import ParameterPlan, Plan, enclosing
from maxmoe.planning.planned_batch import PlannedBatch


@dataclass(frozen=True, kw_only=True)
class StateDtypes:
    """Dtypes in which a rank stores gradients, master weights and moments.

    Mixed precision with bfloat16 parameters usually has float32 master weights and moments::

        StateDtypes(master=torch.float32, moments=torch.float32)

    Args:
        gradients: dtype of the gradients; None for the dtype of the parameters, which collectives have in any case.
        master: dtype of the master weights; None without master weights.
        moments: dtype of the moments of the optimizer; None for the dtype of the parameters.
    """

    gradients: torch.dtype | None = None
    master: torch.dtype | None = None
    moments: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("gradients", "master", "moments"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} must be a floating-point dtype or None, got {dtype!r}")


PARAMETER_DTYPES = StateDtypes()


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
    stored = {name: parameter.bytes(parameter.stored) for name, parameter in plan.parameters.items()}
    trained = {name: parameter for name, parameter in plan.parameters.items() if parameter.is_trained}

    def bytes_in(dtype: torch.dtype | None, elements: int, parameter: ParameterPlan) -> int:
        own = parameter.parameter.dtype
        return elements * stored[parameter.name] // own.itemsize * (dtype or own).itemsize

    memory = {
        "parameters": sum(stored.values()),
        "gradients": sum(bytes_in(dtypes.gradients, 1, parameter) for parameter in trained.values()),
        f"state of {optimizer}": sum(
            bytes_in(dtypes.moments, 1 if name in matrices else 2, parameter) for name, parameter in trained.items()
        ),
    }
    if dtypes.master is not None:
        memory["master weights"] = sum(bytes_in(dtypes.master, 1, parameter) for parameter in trained.values())
    return memory


def gathered_memory(plan: Plan) -> int:
    """Count the gathered parameters of the largest module and of the model itself: modules run one at a time."""
    managed = ((parameter.fsdp_block or None, parameter.bytes(parameter.unsharded)) for parameter in _managed(plan))
    return sum(_largest([*managed, *_gathered_by_units(plan)]))


def unsharded_memory(plan: Plan) -> int:
    """Count the parameters that FSDP manages, before it has sharded them."""
    return sum(parameter.bytes(parameter.unsharded) for parameter in _managed(plan))


def unit_memory(plan: Plan) -> tuple[int, int]:
    """Count as `gathered_memory`, without the parameters that FSDP2 gathers: of the model itself, and of a module."""
    return _largest(_gathered_by_units(plan))


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


def _largest(parts: Iterable[tuple[str | None, int]]) -> tuple[int, int]:
    """Return the bytes for the whole step (None), and of the largest module alone: modules run one at a time."""
    totals: dict[str | None, int] = defaultdict(int)
    for block, count in parts:
        totals[block] += count
    return totals.pop(None, 0), max(totals.values(), default=0)


def _managed(plan: Plan) -> Iterator[ParameterPlan]:
    """Yield the parameters that FSDP2 manages."""
    return (parameter for parameter in plan.parameters.values() if parameter.fsdp_block is not None)


def _gathered_by_units(plan: Plan) -> list[tuple[str | None, int]]:
    """Return the bytes of parameters that units gather, each with the module that frees it; None for the whole step."""
    gathered = (parameter for parameter in plan.parameters.values() if parameter.is_gathered)
    return [(parameter.fsdp_unit or None, parameter.bytes(parameter.used)) for parameter in gathered]
