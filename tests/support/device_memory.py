"""Tensors of a device whose memory the host cannot read: what waits for a real one is an error here.

The numbers lie in CPU tensors that only PyTorch's own operators reach. Those of maxmoe see tensors of another device,
without a data pointer, and run the C++ that they run on every device. An operator of PyTorch that brings a number to
the host, or one of the host to the device, raises `Synchronization`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta")  # not that of the CPU, and autograd needs no driver for it
aten = torch.ops.aten

READS_VALUES = {
    aten._local_scalar_dense.default,  # item, bool, int, float
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
    aten.is_nonzero.default,
    aten.item.default,
}
COPIES_NUMBERS = {aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar}
COPIES_TENSORS = {aten.where.self, aten.copy_.default}


class Synchronization(RuntimeError):
    """The host would have to wait for the device."""


class DeviceTensor(Tensor):
    """On the device; `numbers` are its values."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "DeviceTensor":
        """A view of the numbers that has no memory of its own."""
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} outside of DeviceMemory()")


class DeviceMemory(TorchDispatchMode):
    """Inside of it `DeviceTensor` can be computed with, and no other tensors."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "maxmoe":
            with self:
                return function._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        tensors = tensors_of((args, kwargs))
        device = kwargs.get("device")
        if not any(isinstance(tensor, DeviceTensor) for tensor in tensors) and device != DEVICE:
            return function(*args, **kwargs)
        check(function, tensors, device)
        wrappers = {id(tensor.numbers): tensor for tensor in tensors if isinstance(tensor, DeviceTensor)}
        args, kwargs = to_host((args, kwargs))
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        results = function(*args, **kwargs)
        return tree_map_only(
            Tensor, lambda each: wrappers[id(each)] if id(each) in wrappers else DeviceTensor(each), results
        )


def tensors_of(values: Any) -> list[Tensor]:
    """All in a structure."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def check(function: Any, tensors: list[Tensor], device: torch.device | None) -> None:
    """Raise where host and device would have to wait for each other."""
    moves = device is not None and device != DEVICE
    if function in READS_VALUES or moves:
        raise Synchronization(f"{function} reads values of the device")
    # A number of the host is an argument of the kernel where it is a factor or a term; elsewhere it is copied.
    on_host = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
    if function in COPIES_NUMBERS or on_host and (device is not None or function in COPIES_TENSORS):
        raise Synchronization(f"{function} copies numbers of the host")


def to_device(tensor: Tensor) -> DeviceTensor:
    """The same values there, a leaf of the graph."""
    return DeviceTensor(tensor.detach().clone()).requires_grad_(tensor.requires_grad)


def move_to_device(module: nn.Module) -> nn.Module:
    """All parameters and buffers, in place."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            part.register_parameter(name, nn.Parameter(to_device(parameter.detach())))
        for name, buffer in part.named_buffers(recurse=False):
            part.register_buffer(name, to_device(buffer))
    return module


def to_host(values: Any) -> Any:
    """The numbers of all tensors in a structure."""
    return tree_map_only(DeviceTensor, lambda tensor: tensor.numbers, values)
