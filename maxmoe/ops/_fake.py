"""Registration of fake kernels."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from maxmoe._torch import argument_names

Function = TypeVar("Function", bound=Callable[..., Any])


def register_fake(operator: str) -> Callable[[Function], Function]:
    """Decorate the fake kernel of an operator, which computes shapes and dtypes for torch.compile and meta tensors.

    It is called with the arguments by their names; those that have the default value of the schema may be left out.

    The dispatcher calls a fake kernel if a single argument is a meta tensor. Devices are therefore checked here, as in
    the operators.
    """
    names = argument_names(getattr(torch.ops.maxmoe, operator).default)

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def fake(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            _check_export(operator)
            _check_devices(operator, arguments)
            return function(**arguments)

        torch.library.register_fake(f"maxmoe::{operator}", fake)
        return function

    return register


def _check_export(operator: str) -> None:
    if torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            f"maxmoe::{operator} cannot be exported to ONNX, which has no operators for routing and grouped matrix "
            "products: save the program of torch.export.export with torch.export.save"
        )


def _check_devices(operator: str, arguments: dict[str, Any]) -> None:
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    first, *_ = tensors
    device = tensors[first].device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(
                f"maxmoe::{operator}: {name} must be on the device of {first} ({device}), got {tensor.device}"
            )
