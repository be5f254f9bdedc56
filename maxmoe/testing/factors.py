"""Names for the numbers by which a gradient, or the gradients of the tokens of each rank in it, are wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIGHT = "right"
CLOSE = 1e-6  # relative difference of factors that are equal
Sizes = Mapping[str, int]  # of the run, by name, such as the number of ranks


def is_close(one: float, other: float, tolerance: float = CLOSE) -> bool:
    """Return whether two numbers are equal up to a relative tolerance."""
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def named_factor(factor: float, sizes: Sizes) -> str:
    """Describe a factor by sizes of the run: "4 times: number of ranks"."""
    if abs(factor) < CLOSE:
        return "missing"
    if is_close(factor, 1):
        return RIGHT
    names = [name for name, size in sizes.items() if is_close(factor, size)]
    names += [f"1 / {name}" for name, size in sizes.items() if is_close(factor, 1 / size)]
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


@dataclass(frozen=True)
class Share:
    """Tokens whose gradients one process has computed alone: one micro-batch of the batch of some ranks."""

    ranks: tuple[int, ...]
    micro_batch: int


@dataclass(frozen=True)
class ShareFactors:
    """Factor on the gradient of each share, such as a micro-batch, in the gradient of each rank; 1 is right.

    Attributes:
        ranks: R ranks that have the parameter.
        shares: all S shares.
        factors: ``(R, S)``, float64.
    """

    ranks: list[int]
    shares: list[Share]
    factors: Tensor

    def describe(self, sizes: Sizes) -> str:
        """Say which tokens are missing or have another factor."""
        if not all(_is_constant(column) for column in self.factors.unbind(1)):
            names = ", ".join("+".join(map(str, share.ranks)) for share in self.shares)
            rows = zip(self.ranks[:4], self.factors.tolist(), strict=False)
            texts = [
                f"{', '.join(f'{round(item, 4) + 0.0:g}' for item in row)} times on rank {rank}" for rank, row in rows
            ]
            return f"gradient of the tokens of rank {names}: {'; '.join(texts)}"
        found: dict[str, list[Share]] = {}
        for share, factor in zip(self.shares, self.factors[0].tolist(), strict=True):
            found.setdefault(named_factor(factor, sizes), []).append(share)
        wrong = {text: shares for text, shares in found.items() if text != RIGHT}
        return "; ".join(f"gradient of the tokens of {self._names(shares)}: {text}" for text, shares in wrong.items())

    def _names(self, found: list[Share]) -> str:
        """Name shares by micro-batch if they have the micro-batch of every rank, else by rank."""
        numbers = sorted({share.micro_batch for share in found})
        if len(found) < len(self.shares) and found == [item for item in self.shares if item.micro_batch in numbers]:
            return f"micro-batch {', '.join(str(number + 1) for number in numbers)} of each rank"
        return f"rank {', '.join(str(rank) for rank in sorted({rank for share in found for rank in share.ranks}))}"


def _is_constant(factors: Tensor) -> bool:
    """Return whether there are factors, all equal."""
    return len(factors) > 0 and bool(((factors - factors[0]).abs() <= CLOSE * max(1.0, abs(float(factors[0])))).all())
