"""Tensors of a device whose memory the host cannot read: an operator that would wait for a real device is an error.

The numbers are in CPU tensors that only PyTorch's own operators reach. The operators of maxmoe get tensors of another
device, without a data pointer, and run the C++ that they run on every device. An operator of PyTorch that copies a
number from the device to the host or back raises `SynchronizationError`.
"""

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta")  # not the CPU, and autograd needs no driver for it
aten = torch.ops.aten

READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
READS_MASKS = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
COPIES_TENSORS = {aten.where.self, aten.copy_.default}


class SynchronizationError(RuntimeError):
    """The host would have to wait for the device."""


class DeviceTensor(Tensor):
    """A tensor on the device; `numbers` are its values."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
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
    """Context in which operators compute with `DeviceTensor`.

    Attributes:
        calls: number of calls of each operator of PyTorch.
        largest: elements of the largest result.
        peak_bytes: peak memory of the tensors that were made inside of the context.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.largest = 0
        self.peak_bytes = 0
        self._live_bytes = 0
        self._num_tensors: Counter[int] = Counter()  # by storage

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "maxmoe":
            with self:
                return function._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        device = kwargs.get("device")
        if not any(isinstance(tensor, DeviceTensor) for tensor in tensors) and device != DEVICE:
            return function(*args, **kwargs)
        check_no_waiting(function, tensors, device)
        if function is aten._grouped_mm.default:
            check_grouped_mm(*args)
        self.calls[function.overloadpacket.__name__] += 1
        known = {id(tensor.numbers): tensor for tensor in tensors if isinstance(tensor, DeviceTensor)}
        args, kwargs = to_host((args, kwargs))
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        results = function(*args, **kwargs)
        return tree_map_only(Tensor, lambda each: known[id(each)] if id(each) in known else self._made(each), results)

    def _made(self, numbers: Tensor) -> DeviceTensor:
        tensor = DeviceTensor(numbers)
        storage = numbers.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        self.largest = max(self.largest, numbers.numel())
        if self._num_tensors[address] == 0:
            self._live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        self._num_tensors[address] += 1
        weakref.finalize(tensor, self._freed, address, num_bytes)
        return tensor

    def _freed(self, address: int, num_bytes: int) -> None:
        self._num_tensors[address] -= 1
        if self._num_tensors[address] == 0:
            self._live_bytes -= num_bytes


def check_no_waiting(function: Any, tensors: list[Tensor], device: torch.device | None) -> None:
    """Raise where host and device would have to wait for each other."""
    if function in READS_MASKS:
        reads_values = any(tensor.dtype == torch.bool for tensor in tensors)
    else:
        reads_values = not READS_VALUES.isdisjoint(function.tags)
    if reads_values or device not in (None, DEVICE):
        raise SynchronizationError(f"{function} reads values of the device")
    has_host_tensor = not all(isinstance(tensor, DeviceTensor) for tensor in tensors)
    if has_host_tensor and (device is not None or function in COPIES_TENSORS):
        raise SynchronizationError(f"{function} copies numbers of the host")


def check_grouped_mm(lhs: Tensor, rhs: Tensor, ends: Tensor) -> None:
    """Check the conditions of the CUDA kernel that PyTorch does not check: it would read the wrong memory."""
    assert ends.dtype == torch.int32 and ends.device == DEVICE and len(ends) < 1024
    assert lhs.stride(-1 if rhs.dim() == 3 else -2) == 1, "the first row of a group would begin anywhere"
    for operand in (lhs, rhs):
        strides = [stride for stride, size in zip(operand.stride(), operand.shape, strict=True) if stride != 1]
        numbers = [operand.storage_offset(), *strides]
        assert all(number * operand.element_size() % 16 == 0 for number in numbers), "not at multiples of 16 bytes"


def to_device(tensor: Tensor) -> DeviceTensor:
    """Return a copy on the device, a leaf of the graph."""
    return DeviceTensor(tensor.detach().clone()).requires_grad_(tensor.requires_grad)


def to_host(values: Any) -> Any:
    """Replace the device tensors in a structure by their values."""
    return tree_map_only(DeviceTensor, lambda tensor: tensor.numbers, values)
