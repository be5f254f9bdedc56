"""Checksums of values that must be equal on all ranks, which one all-reduce compares."""

import torch
from torch import Tensor

# A prime below 2^20, so that sums of squares of checksums over 2^13 ranks are exact in float64.
PRIME = 1048573


def checksum(values: Tensor) -> Tensor:
    """Return number, checksum and squared checksum of floating values ``(N,)`` as ``(3,)``, float64.

    Their sums over the ranks tell whether all checksums are equal: `are_equal`.
    """
    value = weighted_sum(values.view(torch.int64 if values.dtype == torch.float64 else torch.int32))
    return torch.stack([torch.ones_like(value), value, value * value]).double()


def weighted_sum(numbers: Tensor) -> Tensor:
    """Return a checksum ``()``, int64, of integers ``(N,)`` and their order, which float32 represents exactly."""
    weights = torch.arange(1, len(numbers) + 1, device=numbers.device)
    return (numbers.long().remainder(PRIME) * weights).sum().remainder(PRIME)


def are_equal(sums: Tensor) -> Tensor:
    """Return whether the checksums in `sums` ``(3,)``, summed over the ranks, are equal: ``()``, bool."""
    # By the inequality of Cauchy and Schwarz, n * sum(c^2) >= (sum c)^2, with equality if all c are equal.
    num_ranks, values, squares = sums.long().unbind()
    return num_ranks * squares == values * values
