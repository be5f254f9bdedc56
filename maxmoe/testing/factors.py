"""Names for the number by which a gradient or a loss is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIGHT = "right"
CLOSE = 1e-6  # relative difference of factors that are equal


@dataclass(frozen=True)
class Size:
    """A size of the run, such as the number of ranks, with its name."""

    name: str
    value: int


def is_close(one: float, other: float, tolerance: float = CLOSE) -> bool:
    """Return whether two numbers are equal up to a relative tolerance."""
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def named_factor(factor: float, sizes: Sequence[Size]) -> str:
    """Describe a factor by sizes of the run: "4 times: number of ranks"."""
    if abs(factor) < CLOSE:
        return "missing"
    if is_close(factor, 1):
        return RIGHT
    names = [size.name for size in sizes if is_close(factor, size.value)]
    names += [f"1 / {size.name}" for size in sizes if is_close(factor, 1 / size.value)]
    names += [name for value, name in ((2, "summed twice"), (-1, "wrong sign")) if is_close(factor, value)]
    return f"{factor:.6g} times: {' or '.join(names)}" if names else f"{factor:.6g} times"


def fit(columns: Sequence[Tensor], values: Tensor, largest_error: float) -> list[float] | None:
    """Return the coefficients with which the columns add up to the values; None if there are none or several."""
    matrix = torch.stack([column.double().flatten() for column in columns], dim=1)
    target = values.double().flatten()
    if not torch.isfinite(matrix).all() or not torch.isfinite(target).all():
        return None
    norms = matrix.norm(dim=0)
    if len(target) <= len(columns) or bool((norms == 0).any()):
        return None
    scaled = matrix / norms
    if int(torch.linalg.matrix_rank(scaled, rtol=1e-8)) < len(columns):
        return None
    solution = torch.linalg.lstsq(scaled, target[:, None]).solution[:, 0]
    if float((scaled @ solution - target).abs().max()) > largest_error:
        return None
    return [float(value) for value in solution / norms]
