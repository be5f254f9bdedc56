"""Private names of the autograd engine: which backward pass runs, and how it ends."""

from collections.abc import Callable

import torch


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
