"""Bytes that a rank stores of parameters, gradients and optimizer state."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import torch

from maxmoe.parallel.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class StateDtypes:
    """Dtypes in which a rank stores gradients, master weights and moments.

    The defaults are the dtypes of mixed-precision training. An optimizer of torch that is given bfloat16 parameters
    keeps moments of the same dtype, and no master weights::

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
