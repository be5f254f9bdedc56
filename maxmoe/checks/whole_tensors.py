"""Check that tensors are whole: not DTensors, of which each process holds a shard."""

import sys
from collections.abc import Mapping

from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a `DTensor`, without importing DTensor, which takes as long as the rest of torch."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


def check_whole(what: str, tensors: Mapping[str, Tensor], *, prefix: str = "") -> None:
    """Raise if one of the tensors of a module at `prefix` is a DTensor; `what` is the function that needs it whole."""
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise ValueError(
                f"{what} needs whole tensors, got {prefix}{name} as a DTensor on {getattr(tensor, 'device_mesh', None)}"
                ": call it before parallelize or fully_shard, or on a module of one process that has loaded the whole "
                "state dict (get_model_state_dict with full_state_dict=True)"
            )
