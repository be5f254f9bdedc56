"""Which mistake explains a wrong gradient: a factor, a missing reduction, the tokens or the term that are wrong."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maxmoe.testing.factors import Size, fit, is_close, named_factor
from maxmoe.testing.layout import distance, largest_of
from maxmoe.testing.shares import Share, ShareFactors
from maxmoe.text_table import ranges


@dataclass(frozen=True)
class Part:
    """Gradient of a parameter on one rank.

    Attributes:
        rank: the rank.
        indices: flat indices of its entries in the whole parameter; None for the whole.
        values: gradient of these entries.
    """

    rank: int
    indices: Tensor | None
    values: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """Return these entries of a whole tensor."""
        return whole.reshape(self.values.shape) if self.indices is None else whole.flatten()[self.indices]


@dataclass(frozen=True)
class Facts:
    """What is known of the run besides a gradient.

    Attributes:
        sizes: sizes that a factor may come from.
        partitions: ranks in groups, by the name of the groups.
        terms: gradients of the terms of the loss, by term and parameter, for the whole batch in one process.
        shares: gradients for parts of the batch, in one process, by parameter.
        weights: number by which the gradients of each share are multiplied in the sum that is that of the whole batch.
        share_factors: factors of the shares that explain other gradients.
    """

    sizes: list[Size]
    partitions: dict[str, list[list[int]]]
    terms: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    shares: list[tuple[Share, Mapping[str, Tensor]]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    share_factors: list[ShareFactors] = field(default_factory=list)


@dataclass(frozen=True)
class WrongGradient:
    """A gradient that differs from that of one process.

    Attributes:
        name: name of the parameter.
        expected: gradient in one process.
        parts: gradients of the ranks that have one.
        largest_error: limit below which a difference is rounding.
        facts: what is known of the run.
    """

    name: str
    expected: Tensor
    parts: Sequence[Part]
    largest_error: float
    facts: Facts

    def explain(self) -> str:
        """Return the first explanation that gives the gradients of all ranks."""
        attempts: tuple[Callable[[], str | None], ...] = (
            self._not_finite,
            self._zero,
            self._one_factor,
            self._terms,
            self._missing_reduction,
            self._shares,
            self._scaled_sum,
            self._factor_per_rank,
            self._permuted,
            self._factor_per_row,
        )
        return next((text for attempt in attempts if (text := attempt())), self._unexplained())

    def _not_finite(self) -> str | None:
        if not torch.isfinite(self._all_values()).all():
            return "not finite"
        return None if torch.isfinite(self.expected).all() else "finite, but not in one process"

    def _zero(self) -> str | None:
        if any(largest_of(part.values) > self.largest_error for part in self.parts):
            return None
        return "detached: the gradient is zero"

    def _one_factor(self) -> str | None:
        factors = fit([self._all_of(self.expected)], self._all_values(), self.largest_error)
        return named_factor(factors[0], self.facts.sizes) if factors else None

    def _terms(self) -> str | None:
        """Terms of the loss with a factor each."""
        gradients = {term: gradient[self.name] for term, gradient in self.facts.terms.items()}
        present = {term: gradient for term, gradient in gradients.items() if largest_of(gradient) > self.largest_error}
        if len(gradients) < 2 or not present:
            return None
        columns = [self._all_of(gradient) for gradient in present.values()]
        factors = fit(columns, self._all_values(), self.largest_error)
        if not factors:
            return None
        wrong = [
            f"the term {term!r} is {self._named(factor)}"
            for term, factor in zip(present, factors, strict=True)
            if not is_close(factor, 1, 1e-6)
        ]
        return "; ".join(wrong)

    def _missing_reduction(self) -> str | None:
        """Gradients of the ranks of a group that are right when they are summed."""
        for name, groups in self.facts.partitions.items():
            found = self._summed(groups)
            if found is None:
                continue
            values, expected = found
            for word, factor in (("sum", 1), ("mean", max(map(len, groups)))):
                if distance(values, factor * expected) <= self.largest_error * factor:
                    return f"missing reduction ({word}) over {name}: each rank has only its own gradient"
        return None

    def _scaled_sum(self) -> str | None:
        """Gradients of the ranks of a group whose sum is a multiple of the right one."""
        for name, groups in self.facts.partitions.items():
            if (found := self._summed(groups)) and (factors := fit([found[1]], found[0], self.largest_error)):
                return f"missing reduction over {name}: the sum is {self._named(factors[0])}"
        return None

    def _summed(self, groups: list[list[int]]) -> tuple[Tensor, Tensor] | None:
        """Return the sums over groups and what they should be; None if the ranks of a group hold different entries."""
        parts = {part.rank: part for part in self.parts}
        sums, expected = [], []
        for group in groups:
            members = [parts[rank] for rank in group if rank in parts]
            if len(members) < 2 or any(not _same_entries(members[0], member) for member in members):
                return None
            sums.append(torch.stack([member.values for member in members]).sum(0).flatten())
            expected.append(members[0].of(self.expected).flatten())
        return torch.cat(sums), torch.cat(expected)

    def _shares(self) -> str | None:
        """Gradients of the tokens of each rank and micro-batch with a factor each."""
        if len(self.facts.shares) < 2:
            return None
        parts = [part for part in self.parts if self._matters(part)]
        columns = [[part.of(gradients[self.name]) for _, gradients in self.facts.shares] for part in parts]
        ranks = [part.rank for part in parts]
        for factors in self.facts.share_factors:
            if factors.ranks == ranks and self._are_sums(parts, columns, factors.rows):
                return factors.describe(self.facts.sizes, self.facts.partitions)
        if not self.facts.weights:
            return self._shares_alone(parts, columns)
        together = [torch.cat([one.flatten() for one in share]) for share in zip(*columns, strict=True)]
        common = fit(together, torch.cat([part.values.flatten() for part in parts]), self.largest_error)
        rows = [common] * len(parts) if common else self._fits(parts, columns)
        if not rows:
            return None
        shares = [share for share, _ in self.facts.shares]
        weights = self.facts.weights
        ratios = [[q / weight for q, weight in zip(row, weights, strict=True)] for row in rows]
        found = ShareFactors(ranks, shares, ratios)
        self.facts.share_factors.append(found)
        return found.describe(self.facts.sizes, self.facts.partitions)

    def _shares_alone(self, parts: Sequence[Part], columns: list[list[Tensor]]) -> str | None:
        """Each rank has computed the loss of its own batch, whose sum or mean is not the loss of the whole batch."""
        for word, factor in (("mean", 1 / len(self.facts.shares)), ("sum", 1.0)):
            sums = [torch.stack(column).sum(0) * factor for column in columns]
            errors = [distance(part.values, total) for part, total in zip(parts, sums, strict=True)]
            if max(errors, default=0.0) <= self.largest_error:
                return f"{word} of the gradients of each rank's batch alone, which is not that of the whole batch"
        return None

    def _fits(self, parts: Sequence[Part], columns: list[list[Tensor]]) -> list[list[float]]:
        """Return the factors of the shares on each rank; nothing if a rank has none."""
        fits = [fit(column, part.values, self.largest_error) for part, column in zip(parts, columns, strict=True)]
        return [found for found in fits if found] if all(fits) else []

    def _are_sums(self, parts: Sequence[Part], columns: list[list[Tensor]], rows: list[list[float]]) -> bool:
        """Return whether known factors give this gradient, too, which may be too small to tell its own."""
        return all(
            distance(
                sum(
                    (q * weight * one for q, weight, one in zip(row, self.facts.weights, column, strict=True)),
                    0.0 * part.values,
                ),
                part.values,
            )
            <= self.largest_error
            for part, column, row in zip(parts, columns, rows, strict=True)
        )

    def _matters(self, part: Part) -> bool:
        """Return whether a rank has, or should have, a gradient that is not zero."""
        expected = part.of(self.expected)
        return (
            bool(expected.numel())
            and float(torch.maximum(expected.abs(), part.values.abs()).max()) > self.largest_error
        )

    def _factor_per_rank(self) -> str | None:
        texts = []
        for part in self.parts:
            if not self._matters(part):
                continue
            factors = fit([part.of(self.expected)], part.values, self.largest_error)
            if not factors:
                return None
            texts.append(f"{self._named(factors[0])} on rank {part.rank}")
        return ", ".join(texts) if len(texts) > 1 else None

    def _permuted(self) -> str | None:
        """Rows of dim 0 in another order, on ranks that hold all of them."""
        is_whole = all(part.indices is None for part in self.parts)
        if not is_whole or not self.expected.ndim or not 1 < len(self.expected) <= 1024:
            return None
        rows = self.expected.flatten(1) if self.expected.ndim > 1 else self.expected[:, None]
        orders = []
        for part in self.parts:
            distances = torch.cdist(part.values.reshape(rows.shape)[None], rows[None], p=float("inf"))[0]
            nearest = distances.min(1)
            if nearest.values.max() > self.largest_error or len(set(nearest.indices.tolist())) < len(rows):
                return None
            orders.append(nearest.indices.tolist())
        return f"permuted along dim 0: row i is that of {orders[0]}[i] in one process"

    def _factor_per_row(self) -> str | None:
        """A factor for each index of dim 0, such as the expert."""
        whole = torch.zeros_like(self.expected)
        covered = torch.zeros(self.expected.numel(), dtype=torch.bool)
        for part in self.parts:
            whole.flatten()[slice(None) if part.indices is None else part.indices.flatten()] = part.values.flatten()
            covered[slice(None) if part.indices is None else part.indices.flatten()] = True
        if self.expected.ndim < 2 or not covered.all():
            return None
        factors: dict[str, list[int]] = {}
        for row, (values, expected) in enumerate(zip(whole, self.expected, strict=True)):
            if max(largest_of(expected), largest_of(values)) <= self.largest_error:
                continue
            found = fit([expected], values, self.largest_error)
            if not found:
                return None
            factors.setdefault(self._named(found[0]), []).append(row)
        if len(factors) > 4:
            return None
        return "; ".join(f"rows {ranges(rows, ', ')} of dim 0: {text}" for text, rows in factors.items())

    def _unexplained(self) -> str:
        values, expected = self._all_values().double(), self._all_of(self.expected).double()
        cosine = torch.nn.functional.cosine_similarity(values, expected, dim=0)
        return f"no single factor (cosine {float(cosine):.4f})"

    def _named(self, factor: float) -> str:
        return named_factor(factor, self.facts.sizes)

    def _all_values(self) -> Tensor:
        return torch.cat([part.values.flatten() for part in self.parts])

    def _all_of(self, whole: Tensor) -> Tensor:
        return torch.cat([part.of(whole).flatten() for part in self.parts])


def _same_entries(one: Part, other: Part) -> bool:
    if one.indices is None or other.indices is None:
        return one.indices is other.indices
    return one.indices.shape == other.indices.shape and bool((one.indices == other.indices).all())
