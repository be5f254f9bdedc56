"""Where in a running model a module is, for error messages."""

import sys
from types import FrameType

from torch import nn


def module_path(module: nn.Module) -> str:
    """Find the path of a module within the outermost module around it whose forward is running.

    A module does not know its place in a model, but the calls around it do: each has its module as `self`. This looks
    at all of them, and is for errors only.

    Args:
        module: whose forward is running.

    Returns:
        The path, as "layers.3.mlp.router"; the name of the class where no module around it is running.
    """
    path = type(module).__name__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        outer = frame.f_locals.get("self")
        if isinstance(outer, nn.Module) and outer is not module:
            path = next((name for name, child in outer.named_modules() if child is module), path)
        frame = frame.f_back
    return path
