"""Gradients of the tokens of each rank and micro-batch: which of them a wrong gradient lacks or counts twice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maxmoe.testing.factors import CLOSE, RIGHT, Size, named_factor


@dataclass(frozen=True)
class Share:
    """Tokens whose gradients one process has computed alone: one micro-batch of the batch of some ranks."""

    ranks: tuple[int, ...]
    micro_batch: int


@dataclass(frozen=True)
class ShareFactors:
    """Factors with which ranks have the gradients of shares; 1 is right.

    Attributes:
        ranks: R ranks that have the parameter.
        shares: all S shares.
        factors: ``(R, S)``, float64.
    """

    ranks: list[int]
    shares: list[Share]
    factors: Tensor

    def describe(self, sizes: Sequence[Size], partitions: Mapping[str, list[list[int]]]) -> str:
        """Say which tokens are missing or have another factor."""
        own, others = self._split([[rank] for rank in self.ranks])
        if _is_constant(own) and _is_constant(others):
            mine, their = named_factor(float(own[0]), sizes), named_factor(float(others[0]), sizes)
            if abs(others[0]) <= CLOSE:
                factor = "" if mine == RIGHT else f", {mine}"
                return f"missing reduction: each rank has only the gradient of its own tokens{factor}"
            if mine != their:
                return f"gradient of the rank's own tokens: {mine}; of the tokens of other ranks: {their}"
        for name, groups in partitions.items():
            near, far = self._split([next((group for group in groups if rank in group), []) for rank in self.ranks])
            if _is_constant(near) and len(far) and far.abs().max() <= CLOSE:
                return f"missing reduction: each rank has only the gradient of the tokens of its {name}"
        if not all(_is_constant(column) for column in self.factors.unbind(1)):
            return (
                "the gradients of the tokens of some ranks are missing or have another factor, differently on each rank"
            )
        found: dict[str, list[Share]] = {}
        for share, factor in zip(self.shares, self.factors[0].tolist(), strict=True):
            found.setdefault(named_factor(factor, sizes), []).append(share)
        wrong = {text: shares for text, shares in found.items() if text != RIGHT}
        return "; ".join(f"gradient of the tokens of {self._names(shares)}: {text}" for text, shares in wrong.items())

    def _split(self, groups: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the factors of the tokens that each rank's group has, and of all other tokens."""
        is_own = torch.tensor([[bool({*group} & {*share.ranks}) for share in self.shares] for group in groups])
        return self.factors[is_own], self.factors[~is_own]

    def _names(self, found: list[Share]) -> str:
        """Name shares by micro-batch if they are those of all ranks, else by rank."""
        numbers = sorted({share.micro_batch for share in found})
        if len(found) < len(self.shares) and found == [item for item in self.shares if item.micro_batch in numbers]:
            return f"micro-batch {', '.join(str(number + 1) for number in numbers)} of each rank"
        return f"rank {', '.join(str(rank) for rank in sorted({rank for share in found for rank in share.ranks}))}"


def _is_constant(factors: Tensor) -> bool:
    """Return whether there are factors, all equal."""
    return len(factors) > 0 and bool(((factors - factors[0]).abs() <= CLOSE * max(1.0, abs(float(factors[0])))).all())
