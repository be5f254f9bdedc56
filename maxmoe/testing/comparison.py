"""Compares what the ranks have computed with one process, and explains what differs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from maxmoe.ranks.failures import RankError
from maxmoe.ranks.rank_processes import RankProcesses
from maxmoe.testing.assembly import (
    FLOOR,
    by_name,
    compare_output,
    gradient_parts,
    place,
)
from maxmoe.testing.explanation import Facts, Part, WrongGradient
from maxmoe.testing.factors import RIGHT, Size, fit, is_close, named_factor
from maxmoe.testing.layout import distance, largest_of
from maxmoe.testing.measurement import (
    WHOLE,
    Measurement,
    ParameterEntries,
    Training,
    gradients_of_parts,
)
from maxmoe.testing.report import Comparison, RankComparison
from maxmoe.testing.run_facts import batches_of_shares, partitions, sizes
from maxmoe.testing.shares import Share

LOSS_FLOOR = 1e-3  # a loss is compared on its own scale, at least this part of the largest gradient
CLEAN = 1e-3  # relative error of a factor that rounding does not give


@dataclass
class RankComparer:
    """Comparison of the ranks with one process; `notes` collects facts for the report."""

    training: Training
    processes: RankProcesses
    one_process: Measurement
    ranks: Sequence[Measurement]
    dtype: torch.dtype
    tolerance: float
    notes: list[str]
    too_small: list[str] = field(default_factory=list)  # names of gradients
    ambiguous: list[str] = field(default_factory=list)  # names of parameters

    def comparison(self) -> RankComparison:
        """Compare loss, outputs and gradients."""
        loss, outputs, gradients = self._loss(), self._outputs(), self._gradients()
        is_equal = all(item.equal for item in (*loss, *outputs, *gradients))
        not_finite = [item.name for item in (*loss, *gradients) if not math.isfinite(item.one_process)]
        return RankComparison(
            "not finite" if not_finite else "equal" if is_equal else "different",
            len(self.ranks),
            self.dtype,
            self.tolerance,
            loss,
            outputs,
            gradients,
            culprits=(f"Infinite or NaN in one process: {_names(not_finite)}.",) if not_finite else (),
            notes=tuple(self.notes),
        )

    def _loss(self) -> tuple[Comparison, ...]:
        """Compare the loss and its terms: the sum or the mean of those of the ranks is that of one process."""
        found = []
        for name, expected in self.one_process.loss.items():
            values = [rank.loss[name] for rank in self.ranks if name in rank.loss]
            if not values:
                self.notes.append(f"No rank returns the {name}.")
                continue
            error, explanation = self._judge_loss(name, expected, values)
            shown = values[:1] if all(is_close(value, values[0], self.tolerance) for value in values) else values
            found.append(Comparison(name, error, expected, tuple(shown), explanation))
        for name in sorted({name for rank in self.ranks for name in rank.loss} - set(self.one_process.loss)):
            self.notes.append(f"The term {name!r} of the loss is not compared: one process does not return it.")
        return tuple(found)

    def _judge_loss(self, name: str, expected: float, values: list[float]) -> tuple[float, str]:
        total, mean = sum(values), sum(values) / len(values)
        if not math.isfinite(expected) or not math.isfinite(mean):
            if expected == mean or (math.isnan(expected) and math.isnan(mean)):
                return 0.0, ""
            return math.inf, "not finite" if math.isfinite(expected) else "finite, but not in one process"
        # A loss may be zero up to rounding: its terms, and with them its gradients, are not.
        scale = max(abs(expected), sum(map(abs, values)) / len(values), LOSS_FLOOR * self._largest) or 1.0
        title = name if name == WHOLE else f"term {name!r} of the loss"
        for copies in [count for count in range(1, len(values) + 1) if len(values) % count == 0]:
            error = abs(total / copies - expected) / scale
            if error <= self.tolerance:
                self.notes.append(f"The {title} of one process is {_reduction(copies, len(values), values)}.")
                return error, ""
        wrong, is_zero = "neither the sum nor the mean over ranks: the mean is", abs(expected) <= self.tolerance * scale
        if is_zero:
            return abs(mean - expected) / scale, f"{wrong} not zero"
        return abs(mean / expected - 1), f"{wrong} {named_factor(mean / expected, self._sizes)}"

    def _outputs(self) -> tuple[Comparison, ...]:
        found = []
        outputs = self.one_process.outputs[0] if self.one_process.outputs else {}
        floor = FLOOR * max((largest_of(entries.values) for entries in outputs.values()), default=0.0)
        for name, entries in outputs.items():
            result = compare_output(name, self.one_process.outputs, self.ranks)
            if result is None:
                self.notes.append(f"The {name} is not compared: on the ranks it is no block of that of one process.")
                continue
            narrow = {item[name].values.dtype for rank in self.ranks for item in rank.outputs if name in item}
            if narrow - {entries.values.dtype}:
                got = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
                expected = str(entries.values.dtype).removeprefix("torch.")
                self.notes.append(f"The {name} is {got} on the ranks, {expected} in one process.")
            error, num_missing = result
            whole = entries.values
            scale = max(largest_of(whole), floor) or 1.0
            explanation = "" if error <= self.tolerance * scale else "differs"
            if num_missing:
                self.notes.append(f"No rank has {num_missing} of {whole.numel()} entries of the {name} of one process.")
            norm = float(whole.norm())
            found.append(Comparison(name, error / scale, norm, (norm,) if not explanation else (), explanation))
        return tuple(found)

    def _gradients(self) -> tuple[Comparison, ...]:
        """Compare the gradients, those with most entries first: what explains them is tried for small ones."""
        parameters = self.one_process.parameters
        everywhere = by_name(self.ranks, list(parameters))
        largest_first = sorted(parameters, key=lambda name: -self._expected[name].numel())
        found = {name: self._gradient(name, parameters[name], everywhere[name]) for name in largest_first}
        trained = [name for name, item in parameters.items() if item.requires_grad and self._expected[name].numel()]
        zero = [name for name in trained if not self._expected[name].any()]
        for title, names in (
            ("Gradients that are zero in one process, so that nothing is compared", zero),
            ("Gradients that are too small to be told from rounding", self.too_small),
            ("Parameters in parts of equal values, of which each rank is taken to have the best one", self.ambiguous),
        ):
            if names:
                self.notes.append(f"{title}: {_names(names)}.")
        if len(zero) < len(trained) and not any(found[name].ranks for name in parameters):
            self.notes.append(
                "No parameter has a gradient on any rank: step must run the backward, and no zero_grad after it."
            )
        return tuple(found[name] for name in parameters)

    def _gradient(self, name: str, expected: ParameterEntries, entries: dict[int, ParameterEntries]) -> Comparison:
        whole = self._expected[name]
        own = largest_of(whole)
        scale = max(own, FLOOR * self._largest, 1e-300)
        placed = place(entries, expected.value.values, self.tolerance)
        if expected.requires_grad and any(len(item.candidates) > 1 for item in placed):
            self.ambiguous.append(name)
        parts = gradient_parts(placed, whole)
        errors = {part.rank: distance(part.values, part.of(whole)) / scale for part in parts}
        error = max(errors.values(), default=0.0)
        explanation = _other_training(expected, entries)
        if not explanation and error > self.tolerance:
            wrong = [rank for rank, item in entries.items() if errors[rank] > self.tolerance and item.gradient is None]
            if wrong:
                explanation = f"detached{_on_ranks(wrong, entries)}: no gradient"
            else:
                explanation = WrongGradient(name, whole, parts, self.tolerance * scale, self._facts).explain()
        elif not explanation and error * scale > self.tolerance * own:
            explanation = self._factor_of_small(name, whole, parts)
        norms = _norms([part for part in parts if entries[part.rank].gradient is not None], whole, bool(explanation))
        return Comparison(name, error, float(whole.norm()), norms, explanation)

    def _factor_of_small(self, name: str, whole: Tensor, parts: Sequence[Part]) -> str:
        """Return the factor of a gradient that is too small to tell its error from rounding; "" if it has none.

        Rounding does not multiply several numbers by the same factor.
        """
        expected = torch.cat([part.of(whole).flatten() for part in parts])
        values = torch.cat([part.values.flatten() for part in parts])
        factors = fit([expected], values, CLEAN * max(largest_of(expected), largest_of(values)))
        if factors and len(torch.unique(whole[whole != 0])) > 2:
            text = named_factor(factors[0], self._sizes, CLEAN)
            return "" if text == RIGHT else text
        self.too_small.append(name)
        return ""

    @cached_property
    def _expected(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(item.value.values) if item.gradient is None else item.gradient.values
            for name, item in self.one_process.parameters.items()
        }

    @cached_property
    def _largest(self) -> float:
        return max(map(largest_of, self._expected.values()), default=0.0)

    @cached_property
    def _sizes(self) -> list[Size]:
        return sizes(self.one_process, self.ranks)

    @cached_property
    def _facts(self) -> Facts:
        """Run one process on parts of the batch, and with each term of the loss alone."""
        facts = Facts(self._sizes, partitions(self.ranks))
        shares = batches_of_shares(self.one_process, self.ranks)
        batches = [self.one_process.batch, *(batch for _, batch in shares)]
        try:
            whole, *others = self.processes.run_alone(gradients_of_parts, self.training, self.dtype, batches)
        except RankError as error:
            self.notes.append(f"One process cannot run the batch of a rank: {str(error).splitlines()[-1]}")
            return facts
        terms = {term: self._filled(gradients) for term, gradients in whole.items()}
        parts: list[tuple[Share, Mapping[str, Tensor]]] = [
            (share, _sum([self._filled(gradients) for gradients in found.values()]))
            for (share, _), found in zip(shares, others, strict=True)
        ]
        weights = self._weights([gradients for _, gradients in parts])
        return Facts(self._sizes, partitions(self.ranks), terms, parts, weights or [])

    def _filled(self, gradients: dict[str, Tensor | None]) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(whole) if gradients.get(name) is None else gradients[name]  # type: ignore[misc]
            for name, whole in self._expected.items()
        }

    def _weights(self, parts: Sequence[Mapping[str, Tensor]]) -> list[float] | None:
        """Return the weights with which the gradients of the shares add up to that of the whole batch."""
        if len(parts) < 2:
            return None
        columns = [torch.cat([gradient.flatten() for gradient in part.values()]) for part in parts]
        whole = torch.cat([gradient.flatten() for gradient in self._expected.values()])
        weights = fit(columns, whole, self.tolerance * self._largest)
        return weights if weights and all(abs(weight) > 1e-9 for weight in weights) else None


def _other_training(expected: ParameterEntries, entries: dict[int, ParameterEntries]) -> str:
    """Say on which ranks a parameter is trained that one process does not train, or the other way round."""
    other = [rank for rank, item in entries.items() if item.requires_grad != expected.requires_grad]
    if not other:
        return ""
    where = _on_ranks(other, entries)
    if expected.requires_grad:
        return f"frozen{where}: requires_grad is False"
    return f"trained{where or ' on the ranks'}, but frozen in one process"


def _on_ranks(some: Sequence[int], entries: dict[int, ParameterEntries]) -> str:
    return "" if len(some) == len(entries) else f" on rank {', '.join(map(str, some))}"


def _norms(parts: Sequence[Part], whole: Tensor, is_wrong: bool) -> tuple[float, ...]:
    """Return the norm of the gradient that the ranks make up together, or of each of them if it is wrong."""
    if not parts:
        return ()
    if is_wrong:
        norms = [float(part.values.norm()) for part in parts]
        return (norms[0],) if all(is_close(value, norms[0], 1e-6) for value in norms) else tuple(norms)
    together = torch.zeros_like(whole).flatten()
    for part in parts:
        together[slice(None) if part.indices is None else part.indices.flatten()] = part.values.flatten()
    return (float(together.norm()),)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _reduction(copies: int, num_ranks: int, values: Sequence[float]) -> str:
    if copies == num_ranks:
        same = all(is_close(value, values[0], 1e-9) for value in values)
        return "that of every rank" if same else "the mean over the ranks"
    return "the sum over the ranks" if copies == 1 else f"the sum over the ranks / {copies}"


def _sum(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum((item[name] for item in gradients[1:]), gradients[0][name]) for name in gradients[0]}
