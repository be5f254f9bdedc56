"""Compares what the ranks have computed with one process, and explains what differs."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from maxmoe.ranks.failures import RankError
from maxmoe.ranks.rank_processes import RankProcesses
from maxmoe.testing.explanation import CLOSE, Facts, Part, Sizes, WrongGradient, is_close, named_factor
from maxmoe.testing.layout import Entries, distance, largest_of, locate, missing_entries
from maxmoe.testing.measurement import (
    WHOLE,
    Measurement,
    ParameterEntries,
    Training,
    gradients_of_terms,
    measure_one_process,
    measure_rank,
    update_between,
)
from maxmoe.testing.module_outputs import first_wrong_module
from maxmoe.testing.report import Comparison, Noun, RankComparison, Verdict
from maxmoe.testing.run_facts import batches_of_shares, partitions, sizes, weights_of
from maxmoe.testing.starts import by_name, different_buffers
from maxmoe.text_table import listed

FLOOR = 1e-2  # the scale of a tensor is its largest entry, at least this part of the largest entry of all tensors
LOSS_FLOOR = 1e-3  # a loss is compared on its own scale, at least this part of the largest gradient
OF_UPDATES = 1e3  # factor on the tolerance for updates, because Adam divides small gradients by their size


@dataclass
class RankComparer:
    """Comparison of a step, or of the update after it, on the ranks with one process."""

    training: Training  # its `steps` is the number of this step
    processes: RankProcesses
    one_process: Measurement
    ranks: Sequence[Measurement]
    dtype: torch.dtype
    tolerance: float
    notes: list[str]  # facts for the report, shared by all steps
    noun: Noun = "gradient"  # "update" if the measurements have updates in the place of gradients
    before: Measurement | None = None  # of the previous step in one process; None for the first step
    too_small: list[str] = field(default_factory=list)  # names of gradients
    ambiguous: list[str] = field(default_factory=list)  # names of parameters

    def comparison(self) -> RankComparison:
        """Compare loss, outputs and gradients."""
        if self.noun == "gradient":
            self.notes.extend(different_buffers(self.one_process, self.ranks, self.tolerance))
        loss, outputs, gradients = self._loss(), self._outputs(), self._gradients()
        is_equal = all(item.equal for item in (*loss, *outputs, *gradients))
        module = "" if all(item.equal for item in outputs or loss) else self._wrong_module()
        not_finite = [item.name for item in (*loss, *gradients) if not math.isfinite(item.one_process)]
        verdict: Verdict = "not finite" if not_finite else "equal" if is_equal else "different"
        culprits: tuple[str, ...] = (f"Infinite or NaN in one process: {listed(not_finite)}.",) if not_finite else ()
        run, notes = (len(self.ranks), self.dtype, self.tolerance), tuple(dict.fromkeys(self.notes))
        step = self.training.steps
        return RankComparison(verdict, *run, loss, outputs, gradients, culprits, notes, step, self.noun, module)

    def update(self, after: "RankComparer") -> "RankComparer":
        """Return the comparison of the update before the next step, without gradients that may be rounding."""
        one_process = update_between(self.one_process, after.one_process)
        for name in self.too_small:
            del one_process.parameters[name]
        ranks = [update_between(*pair) for pair in zip(self.ranks, after.ranks, strict=True)]
        run = self.dtype, min(OF_UPDATES * self.tolerance, 0.5)
        return RankComparer(self.training, self.processes, one_process, ranks, *run, self.notes, "update")

    def _loss(self) -> tuple[Comparison, ...]:
        """Compare the loss and its terms, which are the sum or the mean over the ranks."""
        found = []
        for name, expected in self.one_process.loss.items():
            values = [rank.loss[name] for rank in self.ranks if name in rank.loss]
            if not values:
                self.notes.append(f"No rank returns the {name}.")
                continue
            error, explanation = self._judge_loss(name, expected, values)
            found.append(Comparison(name, error, expected, _once(values, self.tolerance), explanation))
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
                self.notes.append(f"The {title} of one process is {_reduction(copies, values)}.")
                return error, ""
        wrong = "neither the sum nor the mean over ranks: the mean is"
        if abs(expected) <= self.tolerance * scale:
            return abs(mean - expected) / scale, f"{wrong} not zero"
        return abs(mean / expected - 1), f"{wrong} {named_factor(mean / expected, self._sizes)}"

    def _outputs(self) -> tuple[Comparison, ...]:
        found = []
        outputs = self.one_process.outputs[0] if len(self.one_process.outputs) == 1 else {}
        floor = FLOOR * max((largest_of(entries.values) for entries in outputs.values()), default=0.0)
        for name, entries in outputs.items():
            calls = [
                [call[name] for call in of_ranks if call is not None and name in call]
                for of_ranks in itertools.zip_longest(*(rank.outputs for rank in self.ranks))
            ]
            whole, result = entries.values, compare_output(entries.values, calls)
            if result is None:
                self.notes.append(f"The {name} is not compared: it is not a slice of the output of one process.")
                continue
            dtypes = {part.values.dtype for parts in calls for part in parts} - {whole.dtype}
            for dtype in sorted(dtypes, key=str):
                got, expected = (str(item).removeprefix("torch.") for item in (dtype, whole.dtype))
                self.notes.append(f"The {name} is {got} on the ranks, {expected} in one process.")
            error, num_missing = result
            if num_missing:
                self.notes.append(f"No rank has {num_missing} of {whole.numel()} entries of the {name} of one process.")
            scale, norm = max(largest_of(whole), floor) or 1.0, float(whole.norm())
            explanation = "" if error <= self.tolerance * scale else "differs"
            found.append(Comparison(name, error / scale, norm, () if explanation else (norm,), explanation))
        return tuple(found)

    def _wrong_module(self) -> str:
        """Return the name of the module in which the forward goes wrong, "" if no module that can be compared does.

        The step runs again, because hooks on modules may change what they run.
        """
        training = replace(self.training, records_modules=True)
        try:
            one_process = self.processes.run_alone(measure_one_process, training, self.dtype)[0][-1]
            ranks = self.processes.run(measure_rank, len(self.ranks), training, self.dtype)
        except RankError as error:
            self.notes.append(f"The outputs of modules cannot be compared: {str(error).splitlines()[-1]}")
            return ""
        return first_wrong_module(one_process.modules, [steps[-1].modules for steps in ranks], self.tolerance)

    def _gradients(self) -> tuple[Comparison, ...]:
        """Compare the gradients, those with most entries first: what explains them is tried for small ones."""
        parameters = self.one_process.parameters
        everywhere = by_name(self.ranks, list(parameters))
        largest_first = sorted(parameters, key=lambda name: -self._expected[name].numel())
        found = {name: self._gradient(name, parameters[name], everywhere[name]) for name in largest_first}
        trained = [name for name, item in parameters.items() if item.requires_grad and self._expected[name].numel()]
        zero = [name for name in trained if not self._expected[name].any()]
        for title, names in (
            (f"{self.noun.capitalize()}s that are zero in one process, so that nothing is compared", zero),
            (f"{self.noun.capitalize()}s that are too small to be told from rounding", self.too_small),
            (f"Shards with equal values, each matched to the place with the closest {self.noun}", self.ambiguous),
        ):
            if names:
                self.notes.append(f"{title}: {listed(names)}.")
        if len(zero) < len(trained) and not any(item.ranks for item in found.values()):
            self.notes.append(
                "No parameter has a gradient on any rank: step must run the backward, and no zero_grad after it."
            )
        return tuple(found[name] for name in parameters)

    def _gradient(self, name: str, expected: ParameterEntries, entries: dict[int, ParameterEntries]) -> Comparison:
        whole = self._expected[name]
        own = largest_of(whole)
        scale = max(own, FLOOR * self._largest, 1e-300)
        located = locate([item.value for item in entries.values()], expected.value.values)
        if expected.requires_grad and any(len(candidates) > 1 for candidates, _ in located):
            self.ambiguous.append(name)
        parts = [_part(*item, found, whole) for item, (found, _) in zip(entries.items(), located, strict=True)]
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
            self.too_small.append(name)
        norms = _norms([part for part in parts if entries[part.rank].gradient is not None], whole, bool(explanation))
        return Comparison(name, error, float(whole.norm()), norms, explanation)

    @cached_property
    def _expected(self) -> dict[str, Tensor]:
        return self.one_process.gradients()

    @cached_property
    def _largest(self) -> float:
        return max(map(largest_of, self._expected.values()), default=0.0)

    @cached_property
    def _sizes(self) -> Sizes:
        return sizes(self.one_process, self.ranks)

    @cached_property
    def _facts(self) -> Facts:
        """Run one process on parts of the batch, and with each term of the loss alone."""
        groups = partitions(self.ranks)
        if self.noun == "update":
            return Facts(self._sizes, groups, noun=self.noun)
        shares = batches_of_shares(self.one_process, self.ranks)
        batches = [self.one_process.batch, *(batch for _, batch in shares)]
        try:
            whole, *parts = self.processes.run_alone(gradients_of_terms, self.training, self.dtype, batches)
        except RankError as error:
            self.notes.append(f"One process cannot run the batch of a rank: {str(error).splitlines()[-1]}")
            return Facts(self._sizes, groups)
        weights = weights_of(parts, self._expected, self.tolerance * self._largest)
        found = [(share, terms) for (share, _), terms in zip(shares, parts, strict=True)]
        before = self.before.gradients() if self.before else {}
        return Facts(self._sizes, groups, whole, found, weights, before=before)


def compare_steps(steps: Sequence[RankComparer]) -> RankComparison:
    """Compare steps and the updates between them, until one differs."""
    for step, after in itertools.pairwise(steps):
        found = step.comparison()
        if not found.differs:
            found = step.update(after).comparison()
        if found.differs:
            return found
    return steps[-1].comparison()


def compare_output(whole: Tensor, calls: Sequence[Sequence[Entries]]) -> tuple[float, int] | None:
    """Compare an output of the model on the ranks, in each call, with the closest blocks of the whole output.

    Returns the largest difference, and the number of entries that no rank has; None if an output has not the shape of a
    block.
    """
    located = [item for parts in calls for item in locate(parts, whole)]
    if not located or not all(candidates for candidates, _ in located):
        return None
    return max(error for _, error in located), missing_entries([indices[0] for indices, _ in located], whole.numel())


def _part(rank: int, entries: ParameterEntries, candidates: Sequence[Tensor], expected: Tensor) -> Part:
    """Return the gradient of a rank, zeros if it has none; of several blocks, the one with the closest gradient."""
    gradient = entries.gradient or Entries(torch.zeros_like(entries.value.values), entries.value.shape)
    choices = candidates if gradient.indices is None else [gradient.indices.flatten()]
    options = [Part(rank, indices, gradient.values.flatten()) for indices in choices]
    return min(options, key=lambda part: distance(part.values, part.of(expected)))


def _other_training(expected: ParameterEntries, entries: dict[int, ParameterEntries]) -> str:
    """Say on which ranks a parameter is trained that one process does not train, or the other way round."""
    other = [rank for rank, item in entries.items() if item.requires_grad != expected.requires_grad]
    where = _on_ranks(other, entries)
    wrong = "frozen{}: requires_grad is False" if expected.requires_grad else "trained{}, but frozen in one process"
    return wrong.format(where) if other else ""


def _on_ranks(some: Sequence[int], entries: dict[int, ParameterEntries]) -> str:
    return " on the ranks" if len(some) == len(entries) else f" on rank {', '.join(map(str, some))}"


def _norms(parts: Sequence[Part], whole: Tensor, is_wrong: bool) -> tuple[float, ...]:
    """Return the norm of the gradient that the ranks make up together, or of each of them if it is wrong."""
    if not parts:
        return ()
    if is_wrong:
        return _once([float(part.values.norm()) for part in parts], CLOSE)
    together = torch.zeros(whole.numel(), dtype=whole.dtype)
    for part in parts:
        together[part.indices] = part.values.to(whole.dtype)
    return (float(together.norm()),)


def _once(values: Sequence[float], tolerance: float) -> tuple[float, ...]:
    """Return the value of all ranks, or the values of each if they differ."""
    return tuple(values[:1] if all(is_close(value, values[0], tolerance) for value in values) else values)


def _reduction(copies: int, values: Sequence[float]) -> str:
    if copies == len(values):
        return "equal to the loss of every rank" if len(_once(values, 1e-9)) == 1 else "the mean over the ranks"
    return "the sum over the ranks" if copies == 1 else f"the sum over the ranks / {copies}"
