"""Private names of DTensor: the functions that take operators in the place of its own rules."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# What `torch.amp.GradScaler` and the averages of `torch.optim.swa_utils` call with lists of tensors.
UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
LERP = torch.ops.aten._foreach_lerp_.Scalar

# Function of an operator, its arguments and its keyword arguments, in which DTensors are as the caller gave them.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def handler_of(operator: Any) -> Handler:
    """Return the function that DTensor calls for an operator."""
    handler: Handler = DTensor._op_dispatcher._custom_op_handlers[operator]
    return handler


def set_handler(operator: Any, handler: Handler) -> None:
    """Set the function that DTensor calls for an operator; DTensor has no public way to add or change one."""
    DTensor._op_dispatcher._custom_op_handlers[operator] = handler  # type: ignore[assignment]
