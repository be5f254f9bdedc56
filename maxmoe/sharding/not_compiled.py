"""What `torch.compile` leaves out of its graphs."""

from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def not_compiled(function: Function) -> Function:
    """Decorate a function that communicates, or whose shapes depend on what was communicated.

    `torch.compile` breaks the graph there, runs the function and all that it calls as it is, and goes on after it:
    nothing is compiled anew because other ranks sent other numbers of rows.

    Args:
        function: of any signature.

    Returns:
        The function.
    """
    disabled: Function = torch.compiler.disable(function, reason="it communicates")  # type: ignore[no-untyped-call]
    return disabled
