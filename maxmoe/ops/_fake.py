"""What the fake kernels share."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def register_fake(operator: str) -> Callable[[Function], Function]:
    """Declare the fake kernel of an operator: what it returns in shape and dtype, for torch.compile and meta tensors.

    Args:
        operator: without the namespace.

    Returns:
        A decorator that leaves the function as it is.
    """
    register: Callable[[Function], Function] = torch.library.register_fake(f"maxmoe::{operator}")
    return register


def check_devices(operator: str, **tensors: Tensor | None) -> None:
    """Refuse tensors of different devices: one meta tensor is enough to be sent to a fake kernel.

    Args:
        operator: for the message.
        **tensors: the arguments by name; the first one says which device is right.

    Raises:
        ValueError: naming the argument and both devices.
    """
    (first, reference), *others = tensors.items()
    assert reference is not None
    for name, tensor in others:
        if tensor is not None and tensor.device != reference.device:
            raise ValueError(
                f"maxmoe::{operator}: {name} must be on the device of {first} ({reference.device}), got {tensor.device}"
            )
