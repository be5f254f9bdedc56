"""Which mistake explains a wrong gradient: a factor, a missing reduction, the tokens or the term that are wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maxmoe.testing.layout import distance, largest_of
from maxmoe.testing.measurement import ADDED, WHOLE
from maxmoe.testing.report import Noun

Gradients = Mapping[str, Tensor]  # by parameter
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


def describe_shares(ranks: Sequence[int], shares: Sequence[Share], factors: Tensor, sizes: Sizes) -> str:
    """Say which tokens are missing or count with another factor than 1.

    `factors` ``(R, S)`` are the factors on the gradient of each share in the gradient of each rank.
    """
    if bool(((factors - factors[0]).abs() > CLOSE * factors[0].abs().clamp_min(1.0)).any()):
        names = ", ".join("+".join(map(str, share.ranks)) for share in shares)
        rows = zip(ranks[:4], factors.tolist(), strict=False)
        texts = [f"{', '.join(f'{round(item, 4) + 0.0:g}' for item in row)} times on rank {rank}" for rank, row in rows]
        return f"gradient of the tokens of rank {names}: {'; '.join(texts)}"
    found: dict[str, list[Share]] = {}
    for share, factor in zip(shares, factors[0].tolist(), strict=True):
        found.setdefault(named_factor(factor, sizes), []).append(share)
    found.pop(RIGHT, None)
    return "; ".join(f"gradient of the tokens of {_names(part, shares)}: {text}" for text, part in found.items())


def _names(some: list[Share], shares: Sequence[Share]) -> str:
    """Name shares by micro-batch if they have the micro-batch of every rank, else by rank."""
    numbers = sorted({share.micro_batch for share in some})
    if len(some) < len(shares) and some == [share for share in shares if share.micro_batch in numbers]:
        return f"micro-batch {', '.join(str(number + 1) for number in numbers)} of each rank"
    return f"rank {', '.join(str(rank) for rank in sorted({rank for share in some for rank in share.ranks}))}"


@dataclass(frozen=True)
class Part:
    """Gradient of a parameter on one rank."""

    rank: int
    indices: Tensor  # (N,), flat, of its entries in the whole parameter
    values: Tensor  # (N,), gradient of these entries

    def of(self, whole: Tensor) -> Tensor:
        """Return these entries of a whole tensor."""
        return whole.flatten()[self.indices]


@dataclass(frozen=True)
class Facts:
    """What is known of the run besides a gradient."""

    sizes: Sizes  # that a factor may come from
    partitions: Mapping[str, list[list[int]]]  # ranks in groups, by the name of the groups
    terms: Mapping[str, Gradients] = field(default_factory=dict)  # of the loss, for the whole batch in one process
    shares: list[tuple[Share, Mapping[str, Gradients]]] = field(default_factory=list)  # parts of the batch, by term
    # Factors of the gradients of the shares in the gradient of the whole batch; empty if they do not add up to it.
    weights: list[float] = field(default_factory=list)
    known: list[tuple[list[int], Tensor]] = field(default_factory=list)  # ranks, factors that explain other gradients
    noun: Noun = "gradient"
    before: Gradients = field(default_factory=dict)  # of the previous step in one process; empty for the first step


@dataclass(frozen=True)
class WrongGradient:
    """A gradient that differs from the gradient in one process."""

    name: str  # of the parameter
    expected: Tensor  # gradient in one process
    parts: Sequence[Part]  # gradients of the ranks that have the parameter
    largest_error: float  # below which a difference is rounding
    facts: Facts

    def explain(self) -> str:
        """Return the first explanation that gives the gradients of all ranks."""
        return (
            self._not_finite()
            or self._zero()
            or self._one_factor()
            or self._step_before()
            or self._terms()
            or self._missing_reduction()
            or self._factor_per_rank()
            or self._shares()
            or self._terms_of_shares()
            or self._unexplained()
        )

    def _not_finite(self) -> str | None:
        if not torch.isfinite(self._values).all():
            return "not finite"
        return None if torch.isfinite(self.expected).all() else "finite, but not in one process"

    def _zero(self) -> str | None:
        if largest_of(self._values) > self.largest_error:
            return None
        return "no update" if self.facts.noun == "update" else "detached: the gradient is zero"

    def _one_factor(self) -> str | None:
        factors = fit([self._on_ranks(self.expected)], self._values, self.largest_error)
        return self._named(factors[0]) if factors else None

    def _step_before(self) -> str | None:
        if self.name not in self.facts.before:
            return None
        gradients = self.expected, self.facts.before[self.name]
        factors = fit([self._on_ranks(gradient) for gradient in gradients], self._values, self.largest_error)
        return f"{self._named(factors[0])}, and the gradient of the step before" if factors else None

    def _terms(self) -> str:
        """Terms of the loss with a factor each."""
        factors = self._factors_of({term: gradients[self.name] for term, gradients in self.facts.terms.items()})
        return "; ".join(self._wrong_terms(factors))

    def _missing_reduction(self) -> str | None:
        """Gradients of the ranks of a group that are right when they are summed."""
        parts = {part.rank: part for part in self.parts}
        for name, groups in self.facts.partitions.items():
            present = [[parts[rank] for rank in group if rank in parts] for group in groups]
            members = [of_group for of_group in present if of_group]
            if any(len(of_group) < 2 for of_group in members) or any(
                not torch.equal(part.indices, of_group[0].indices) for of_group in members for part in of_group
            ):
                continue
            values = torch.cat([torch.stack([part.values for part in of_group]).sum(0) for of_group in members])
            expected = torch.cat([of_group[0].of(self.expected) for of_group in members])
            for word, factor in (("sum", 1), ("mean", max(map(len, groups)))):
                if distance(values, factor * expected) <= self.largest_error * factor:
                    return f"missing reduction ({word}) over {name}: each rank has only its own {self.facts.noun}"
        return None

    def _factor_per_rank(self) -> str | None:
        texts = []
        for part in filter(self._matters, self.parts):
            factors = fit([part.of(self.expected)], part.values, self.largest_error)
            if not factors:
                return None
            texts.append(f"{self._named(factors[0])} on rank {part.rank}")
        return ", ".join(texts) if len(texts) > 1 else None

    def _shares(self) -> str | None:
        """Gradients of the tokens of each rank and micro-batch with a factor each."""
        if not self.facts.weights:
            return None
        parts = [part for part in self.parts if self._matters(part)]
        gradients = [
            weight * torch.stack([gradients[self.name] for gradients in terms.values()]).sum(0)
            for weight, (_, terms) in zip(self.facts.weights, self.facts.shares, strict=True)
        ]
        columns = [[part.of(gradient) for gradient in gradients] for part in parts]
        ranks = [part.rank for part in parts]
        pairs = [*zip(parts, columns, strict=True)]
        for of_ranks, factors in self.facts.known:
            if of_ranks == ranks and all(
                distance(torch.stack(column, 1) @ row.to(part.values), part.values) <= self.largest_error
                for (part, column), row in zip(pairs, factors, strict=True)
            ):
                break
        else:
            together = [torch.cat(share) for share in zip(*columns, strict=True)]
            common = fit(together, torch.cat([part.values for part in parts]), self.largest_error)
            found = [common or fit(column, part.values, self.largest_error) for part, column in pairs]
            if not all(found):
                return None
            factors = torch.tensor(found, dtype=torch.float64)
            self.facts.known.append((ranks, factors))
        return describe_shares(ranks, [share for share, _ in self.facts.shares], factors, self.facts.sizes)

    def _terms_of_shares(self) -> str | None:
        """Each rank has computed the loss of its own batch, whose sum or mean is not the loss of the whole batch."""
        shares = [terms for _, terms in self.facts.shares]
        gradients = {
            term: torch.stack([terms[term][self.name] for terms in shares if term in terms]).sum(0)
            for term in {term: None for terms in shares for term in terms}
        }
        factors = self._factors_of(gradients)
        for word, factor in (("mean", len(shares)), ("sum", 1)):
            wrong = self._wrong_terms({term: factor * value for term, value in factors.items()})
            if len(wrong) < len(factors):
                text = f"{word} of the gradients of each rank's batch alone, not the gradient of the whole batch"
                return "; ".join([text, *wrong])
        return None

    def _unexplained(self) -> str:
        values, expected = self._values.double(), self._on_ranks(self.expected).double()
        cosine = torch.nn.functional.cosine_similarity(values, expected, dim=0)
        return f"no single factor (cosine {float(cosine):.4f})"

    def _factors_of(self, terms: Gradients) -> dict[str, float]:
        """Return the factors with which gradients by term add up to the gradients of the ranks, if there are any."""
        present = {term: values for term, values in terms.items() if largest_of(values) > self.largest_error}
        columns = [self._on_ranks(gradient) for gradient in present.values()]
        factors = fit(columns, self._values, self.largest_error) if present else None
        return dict(zip(present, factors, strict=True)) if factors else {}

    def _wrong_terms(self, factors: Mapping[str, float]) -> list[str]:
        """Name the terms whose factor is not 1."""
        named = {term: self._named(factor) for term, factor in factors.items()}
        subjects = {WHOLE: "the loss", ADDED: f"the auxiliary gradient {ADDED}"}
        hints = {ADDED: ", see set_aux_loss_scale"}
        return [
            f"{subjects.get(term, f'the term {term!r}')} is {text}{hints.get(term, '')}"
            for term, text in named.items()
            if text != RIGHT
        ]

    def _matters(self, part: Part) -> bool:
        """Return whether a rank has, or should have, a gradient that is not zero."""
        return max(largest_of(part.of(self.expected)), largest_of(part.values)) > self.largest_error

    def _named(self, factor: float) -> str:
        return named_factor(factor, self.facts.sizes)

    @property
    def _values(self) -> Tensor:
        return torch.cat([part.values for part in self.parts])

    def _on_ranks(self, whole: Tensor) -> Tensor:
        return torch.cat([part.of(whole) for part in self.parts])
