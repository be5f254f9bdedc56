"""Private names of autograd: backward passes, `torch.utils.checkpoint` and the function transforms (`torch.func`).

They tell which backward pass runs, which forward a recomputation repeats, and whether a tensor belongs to a transform.
torch has no public functions for this.
"""

import inspect
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction

Hooks = tuple[Callable[[Tensor], object], Callable[[object], Tensor]]


def backward_id() -> int:
    """Return the number of the backward pass that this thread executes; -1 outside of one."""
    return torch._C._current_graph_task_id()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that this thread executes has ended.

    After an exception it is not called, but destroyed before the exception is raised. FSDP2 and DDP use this function.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_backward_running() -> bool:
    """Return whether this thread executes a backward pass."""
    return backward_id() != -1


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


def running_checkpoints() -> list[object]:
    """Return an object for each checkpoint whose forward or recomputation runs, the same object in both.

    It lives as long as the graph of the forward. For a reentrant checkpoint, of torch or of another library, it is the
    context of its `torch.autograd.Function`, which may also be a Function that recomputes nothing.
    """
    frames = checkpoint_frames()
    return frames if torch.is_grad_enabled() and not is_backward_running() else [*frames, *_running_functions()]


def _running_functions() -> Iterator[FunctionCtx]:
    """Yield the contexts of the Functions in Python whose forward or backward runs, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("ctx",) and isinstance(frame.f_locals.get("ctx"), FunctionCtx):
            yield frame.f_locals["ctx"]
        frame = frame.f_back


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
    return next(_frames_of(CheckpointFunction.forward, CheckpointFunction.backward), None) is not None


def is_recomputed_with_gradients() -> bool:
    """Return whether the forward of a reentrant `torch.utils.checkpoint` runs, and an input of it requires a gradient.

    Such a forward runs without gradients; its recomputation has them.
    """
    return any(any(frame.f_locals["ctx"].needs_input_grad) for frame in _frames_of(CheckpointFunction.forward))


def _frames_of(*functions: Callable[..., object]) -> Iterator[FrameType]:
    """Yield the frames of calls of functions that are running, the innermost first."""
    codes = [function.__code__ for function in functions]
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in codes:
            yield frame
        frame = frame.f_back


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor is a batched tensor of `torch.func.vmap`, also inside of other transforms."""
    if torch.compiler.is_compiling():
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def hides_gradient(tensor: Tensor) -> bool:
    """Return whether `requires_grad` of a tensor is False because of `torch.func.vmap` or `jvp`.

    Their tensors wrap others, outside of the transform, which autograd differentiates.
    """
    if tensor.requires_grad or torch.compiler.is_compiling():
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad
