"""The switch between the kernels and ATen."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from maxmoe import _C


@contextmanager
def force_aten(enabled: bool = True) -> Iterator[None]:
    """Send CPU tensors, too, through the ATen implementation that other devices use.

    For tests, and to tell whether a kernel is at fault. Holds for all threads of the process.

    Args:
        enabled: False turns the kernels back on inside of an enclosing `force_aten`.

    Yields:
        Nothing.
    """
    before = _C.aten_forced()
    _C.force_aten(enabled)
    try:
        yield
    finally:
        _C.force_aten(before)


def uses_kernels(tensor: Tensor) -> bool:
    """Return whether the operators compute it with the kernels, and not through ATen.

    Args:
        tensor: any.

    Returns:
        As `uses_kernels` of C++.
    """
    return tensor.device.type == "cpu" and not _is_forced()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_forced() -> bool:
    return _C.aten_forced()
