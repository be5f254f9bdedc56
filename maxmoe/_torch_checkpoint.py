"""Private names of `torch.utils.checkpoint`, see `maxmoe/_torch.py`.

They tell which forward a recomputation repeats. No public function does.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

Hooks = tuple[Callable[[Tensor], object], Callable[[object], Tensor]]


def is_packed_by_checkpoint() -> bool:
    """Return whether a non-reentrant `torch.utils.checkpoint` currently packs the tensors that autograd saves."""
    hooks = _top_hooks()
    return hooks is not None and _is_of_checkpoint(hooks)


def checkpoint_frames() -> list[object]:
    """Return the objects that non-reentrant checkpoints share between forward and recomputation, the innermost first.

    A frame lives as long as the graph of the forward.
    """
    frames = []
    for pack, _ in filter(_is_of_checkpoint, _all_hooks()):
        variables = inspect.getclosurevars(inspect.unwrap(pack)).nonlocals
        is_recomputed = "target_frame_ref" in variables
        frames.append(variables["target_frame_ref"]() if is_recomputed else variables["frame"])
    return frames


def _is_of_checkpoint(hooks: Hooks) -> bool:
    return hooks[0].__module__ == torch.utils.checkpoint.__name__


def _top_hooks() -> Hooks | None:
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def _all_hooks() -> list[Hooks]:
    """Return the hooks on saved tensors that are in force, the innermost first."""
    found = []
    try:
        while (hooks := _top_hooks()) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            found.append(hooks)
    finally:
        for hooks in reversed(found):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    return found


def is_reentrant_checkpoint() -> bool:
    """Return whether the forward or the recomputation of a reentrant `torch.utils.checkpoint` runs."""
    codes = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None
