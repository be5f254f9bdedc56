"""Path of a running module in its model, for error messages."""

import sys
from types import FrameType

import torch
from torch import nn


def module_path(module: nn.Module) -> str:
    """Return the path of a module, such as "layers.3.mlp.router", in the outermost module whose forward is running.

    Without such a module, and while the call is compiled, the name of the class. A module does not know its path, so
    this searches the call stack for modules named `self`. It is slow, and for errors only.
    """
    path = type(module).__name__
    if torch.compiler.is_compiling():
        return path
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        outer = frame.f_locals.get("self")
        if isinstance(outer, nn.Module) and outer is not module:
            path = next((name for name, child in outer.named_modules() if child is module), path)
        frame = frame.f_back
    return path
