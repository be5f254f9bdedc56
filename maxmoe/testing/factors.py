"""Names for the number by which a gradient or a loss is wrong."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TWICE, RIGHT = "summed twice", "right"


@dataclass(frozen=True)
class Size:
    """A size of the run, such as the number of ranks, with its name."""

    name: str
    value: int


def is_close(one: float, other: float, tolerance: float) -> bool:
    """Return whether two numbers are equal up to a relative tolerance."""
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def named_factor(factor: float, sizes: Sequence[Size], tolerance: float = 1e-6) -> str:
    """Describe a factor by sizes of the run: "4 times: number of ranks"."""
    text = f"{factor:.6g} times"
    if abs(factor) < tolerance:
        return "missing"
    if is_close(factor, 1, tolerance):
        return RIGHT
    names = [size.name for size in sizes if is_close(factor, size.value, tolerance)]
    names += [f"1 / {size.name}" for size in sizes if is_close(factor, 1 / size.value, tolerance)]
    if is_close(factor, 2, tolerance):
        names.append(TWICE)
    if not names:
        names = _pairs(factor, sizes, tolerance)[:1]
    if not names and is_close(factor, -1, tolerance):
        names = ["wrong sign"]
    return f"{text}: {' or '.join(names)}" if names else text


def _pairs(factor: float, sizes: Sequence[Size], tolerance: float) -> list[str]:
    found = []
    for one, other in itertools.combinations(sizes, 2):
        for value, name in (
            (one.value * other.value, f"{one.name} ({one.value}) x {other.name} ({other.value})"),
            (one.value / other.value, f"{one.name} ({one.value}) / {other.name} ({other.value})"),
        ):
            if is_close(factor, value, tolerance):
                found.append(name)
            elif is_close(factor, 1 / value, tolerance):
                found.append(f"1 / ({name})")
    return found


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
