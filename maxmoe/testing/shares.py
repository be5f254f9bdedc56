"""Gradients of the tokens of each rank and micro-batch: which of them a wrong gradient lacks or counts twice."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from maxmoe.testing.factors import RIGHT, Size, named_factor

CLOSE = 1e-6  # factors below this difference are equal


@dataclass(frozen=True)
class Share:
    """Tokens whose gradients one process has computed alone: one micro-batch of the batch of some ranks."""

    ranks: tuple[int, ...]
    micro_batch: int


@dataclass(frozen=True)
class ShareFactors:
    """Factors with which ranks have the gradients of shares; 1 is right.

    Attributes:
        ranks: ranks that have the parameter.
        shares: all shares.
        rows: factor of each share, by rank.
    """

    ranks: list[int]
    shares: list[Share]
    rows: list[list[float]]

    def describe(self, sizes: Sequence[Size], partitions: Mapping[str, list[list[int]]]) -> str:
        """Say which tokens are missing or have another factor."""
        own, others = self._split(lambda rank, share: rank in share.ranks)
        if own and others and _all_close(own) and _all_close(others):
            if abs(others[0]) > CLOSE:
                mine, their = named_factor(own[0], sizes), named_factor(others[0], sizes)
                if mine != their:
                    return f"gradient of the rank's own tokens: {mine}; of the tokens of other ranks: {their}"
            else:
                factor = "" if abs(own[0] - 1) <= CLOSE else f", {named_factor(own[0], sizes)}"
                return f"missing reduction: each rank has only the gradient of its own tokens{factor}"
        for name, groups in partitions.items():
            near, far = self._split(lambda rank, share, groups=groups: _are_together(rank, share, groups))  # type: ignore[misc]
            if near and far and _all_close(near) and not any(abs(factor) > CLOSE for factor in far):
                return f"missing reduction: each rank has only the gradient of the tokens of its {name}"
        columns = list(zip(*self.rows, strict=True))
        if not all(_all_close(column) for column in columns):
            return (
                "the gradients of the tokens of some ranks are missing or have another factor, differently on each rank"
            )
        factors: dict[str, list[Share]] = {}
        for share, column in zip(self.shares, columns, strict=True):
            factors.setdefault(named_factor(column[0], sizes), []).append(share)
        return "; ".join(
            f"gradient of the tokens of {self._names(found)}: {text}"
            for text, found in factors.items()
            if text != RIGHT
        )

    def _split(self, belongs: Callable[[int, Share], bool]) -> tuple[list[float], list[float]]:
        """Return the factors of the pairs of rank and share that belong together, and of all others."""
        inside: list[float] = []
        outside: list[float] = []
        for rank, row in zip(self.ranks, self.rows, strict=True):
            for share, factor in zip(self.shares, row, strict=True):
                (inside if belongs(rank, share) else outside).append(factor)
        return inside, outside

    def _names(self, found: list[Share]) -> str:
        """Name shares by micro-batch if they are those of all ranks, else by rank."""
        micro_batches = sorted({share.micro_batch for share in found})
        if len(found) < len(self.shares) and found == [
            item for item in self.shares if item.micro_batch in micro_batches
        ]:
            return f"micro-batch {', '.join(str(number + 1) for number in micro_batches)} of each rank"
        return f"rank {', '.join(str(rank) for rank in sorted({rank for share in found for rank in share.ranks}))}"


def _are_together(rank: int, share: Share, groups: list[list[int]]) -> bool:
    return any(rank in group and not set(group).isdisjoint(share.ranks) for group in groups)


def _all_close(values: Sequence[float]) -> bool:
    return all(abs(value - values[0]) <= CLOSE * max(1.0, abs(values[0])) for value in values)
