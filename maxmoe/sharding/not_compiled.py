"""Decorator for functions that `torch.compile` leaves out of its graphs."""

from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def not_compiled(function: Function) -> Function:
    """Exclude a function from compilation, because it communicates or its shapes depend on communicated values.

    `torch.compile` breaks the graph at the call and runs the function in eager mode. A change in the number of rows
    that other ranks send therefore causes no recompilation.
    """
    disabled: Function = torch.compiler.disable(function, reason="it communicates")  # type: ignore[no-untyped-call]
    return disabled
