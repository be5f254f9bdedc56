"""Dtypes of gradients and optimizer state beside those of the parameters."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class StateDtypes:
    """Dtypes in which a rank stores gradients, master weights and moments.

    Mixed precision with bfloat16 parameters usually has float32 master weights and moments::

        StateDtypes(master=torch.float32, moments=torch.float32)

    Args:
        gradients: dtype of the gradients; None for that of the parameters. Collectives have the dtype of the
            parameters in any case.
        master: dtype of the master weights; None without master weights.
        moments: dtype of the moments of the optimizer; None for that of the parameters.
    """

    gradients: torch.dtype | None = None
    master: torch.dtype | None = None
    moments: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("gradients", "master", "moments"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} must be a floating-point dtype or None, got {dtype!r}")
