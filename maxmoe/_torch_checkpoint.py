"""Private names of `torch.utils.checkpoint`, see `maxmoe/_torch.py`.

They tell which forward a recomputation repeats. No public function does.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction


def is_packed_by_checkpoint() -> bool:
    """Return whether a non-reentrant `torch.utils.checkpoint` currently packs the tensors that autograd saves."""
    return _pack_of_checkpoint() is not None


def checkpoint_frame() -> object | None:
    """Return the object that a non-reentrant checkpoint shares between forward and recomputation; None outside of both.

    It lives as long as the graph of the forward.
    """
    variables = _variables_of_checkpoint()
    if "target_frame_ref" in variables:  # in the recomputation
        frame: object = variables["target_frame_ref"]()
        return frame
    return variables.get("frame")


def is_checkpointed_forward() -> bool:
    """Return whether the forward of a non-reentrant checkpoint runs, of the innermost one if they are nested."""
    return "frame" in _variables_of_checkpoint()


def _variables_of_checkpoint() -> Mapping[str, Any]:
    pack = _pack_of_checkpoint()
    return {} if pack is None else inspect.getclosurevars(inspect.unwrap(pack)).nonlocals


def _pack_of_checkpoint() -> Callable[[Tensor], object] | None:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__ else None


def is_reentrant_checkpoint() -> bool:
    """Return whether the forward of a reentrant `torch.utils.checkpoint` runs."""
    code, frame = CheckpointFunction.forward.__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
