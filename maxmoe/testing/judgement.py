"""Compares what the ranks have computed with one process, and explains what differs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from maxmoe.parallel.failures import RankError
from maxmoe.testing.assembly import (
    FLOOR,
    batch_sizes,
    by_name,
    compare_output,
    gradient_parts,
    place,
)
from maxmoe.testing.comparison import Comparison, RankComparison
from maxmoe.testing.explanation import Facts, Part, WrongGradient
from maxmoe.testing.factors import Size, fit, is_close, named_factor
from maxmoe.testing.layout import distance
from maxmoe.testing.measurement import (
    WHOLE,
    Measurement,
    ParameterEntries,
    Training,
    gradients_of_parts,
    tensors_in,
)
from maxmoe.testing.rank_processes import RankProcesses
from maxmoe.testing.shares import Share


@dataclass
class Judgement:
    """Comparison of the ranks with one process; `notes` collects facts for the report."""

    training: Training
    processes: RankProcesses
    one_process: Measurement
    ranks: Sequence[Measurement]
    dtype: torch.dtype
    tolerance: float
    notes: list[str]

    def comparison(self) -> RankComparison:
        """Compare loss, outputs and gradients."""
        loss, outputs, gradients = self._loss(), self._outputs(), self._gradients()
        is_equal = all(item.equal for item in (*loss, *outputs, *gradients))
        return RankComparison(
            "equal" if is_equal else "different",
            len(self.ranks),
            self.dtype,
            self.tolerance,
            loss,
            outputs,
            gradients,
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
        return tuple(found)

    def _judge_loss(self, name: str, expected: float, values: list[float]) -> tuple[float, str]:
        total, scale = sum(values), abs(expected) or 1.0
        title = name if name == WHOLE else f"term {name!r} of the loss"
        for copies in [count for count in range(1, len(values) + 1) if len(values) % count == 0]:
            error = abs(total / copies - expected) / scale
            if error <= self.tolerance:
                self.notes.append(f"The {title} of one process is {_reduction(copies, len(values), values)}.")
                return error, ""
        mean = named_factor(total / len(values) / expected, self._sizes) if expected else "not zero"
        return abs(
            total / len(values) - expected
        ) / scale, f"neither the sum nor the mean over ranks: the mean is {mean}"

    def _outputs(self) -> tuple[Comparison, ...]:
        found = []
        for name, entries in (self.one_process.outputs[0] if self.one_process.outputs else {}).items():
            result = compare_output(name, self.one_process.outputs, self.ranks)
            if result is None:
                self.notes.append(f"The {name} is not compared: on the ranks it is no block of that of one process.")
                continue
            error, num_missing = result
            whole = entries.values
            scale = float(whole.abs().max()) if whole.numel() else 0.0
            explanation = "" if error <= self.tolerance * (scale or 1.0) else "differs"
            if num_missing:
                self.notes.append(f"No rank has {num_missing} of {whole.numel()} entries of the {name} of one process.")
            norm = float(whole.norm())
            found.append(
                Comparison(name, error / (scale or 1.0), norm, (norm,) if not explanation else (), explanation)
            )
        return tuple(found)

    def _gradients(self) -> tuple[Comparison, ...]:
        """Compare the gradients, those with most entries first: what explains them is tried for small ones."""
        parameters = self.one_process.parameters
        everywhere = by_name(self.ranks, list(parameters))
        largest_first = sorted(parameters, key=lambda name: -self._expected[name].numel())
        found = {name: self._gradient(name, parameters[name], everywhere[name]) for name in largest_first}
        return tuple(found[name] for name in parameters)

    def _gradient(self, name: str, expected: ParameterEntries, entries: dict[int, ParameterEntries]) -> Comparison:
        whole = self._expected[name]
        scale = max(float(whole.abs().max()) if whole.numel() else 0.0, FLOOR * self._largest, 1e-300)
        norm = float(whole.norm())
        placed = place(entries, expected.value.values, self.tolerance)
        parts = gradient_parts(placed, whole)
        has_gradient = bool((whole.abs() > self.tolerance * scale).any())
        without = sorted(set(entries) - {part.rank for part in parts})
        if has_gradient and without:
            return Comparison(name, 1.0, norm, (), self._absent(entries, without))
        errors = [distance(part.values, part.of(whole)) / scale for part in parts]
        shown = self._norms(parts, norm, max(errors, default=0.0))
        if max(errors, default=0.0) <= self.tolerance:
            return Comparison(name, max(errors, default=0.0), norm, shown)
        explanation = WrongGradient(name, whole, parts, self.tolerance * scale, self._facts).explain()
        return Comparison(name, max(errors), norm, shown, explanation)

    def _absent(self, entries: dict[int, ParameterEntries], without: list[int]) -> str:
        where = "" if len(without) == len(entries) else f" on rank {', '.join(map(str, without))}"
        if all(not entries[rank].requires_grad for rank in without):
            return f"frozen{where}: requires_grad is False"
        return f"detached{where}: no gradient"

    def _norms(self, parts: Sequence[Part], norm: float, error: float) -> tuple[float, ...]:
        """Return the norm over all ranks if their parts make up the whole, otherwise that of each rank."""
        if error <= self.tolerance:
            return (norm,)
        norms = [float(part.values.norm()) for part in parts]
        return (norms[0],) if all(is_close(value, norms[0], 1e-6) for value in norms) else tuple(norms)

    @cached_property
    def _expected(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(item.value.values) if item.gradient is None else item.gradient.values
            for name, item in self.one_process.parameters.items()
        }

    @cached_property
    def _largest(self) -> float:
        return max((float(whole.abs().max()) for whole in self._expected.values() if whole.numel()), default=0.0)

    @cached_property
    def _num_calls(self) -> int:
        """Number of forward calls on a rank for each in one process."""
        return max(len(rank.outputs) for rank in self.ranks) // max(len(self.one_process.outputs), 1)

    @cached_property
    def _partitions(self) -> dict[str, list[list[int]]]:
        """Groups of ranks by name: those of meshes and other process groups, and all ranks."""
        found: dict[str, list[list[int]]] = {}
        for rank in self.ranks:
            for name, group in rank.groups.items():
                if len(group) > 1 and name != "default_pg":
                    label = f"mesh axis {name[5:]!r}" if name.startswith("mesh_") else f"a group of {len(group)} ranks"
                    groups = found.setdefault(label, [])
                    if group not in groups:
                        groups.append(group)
        everyone = list(range(len(self.ranks)))
        return {"all ranks": [everyone]} | {name: groups for name, groups in found.items() if groups != [everyone]}

    @cached_property
    def _sizes(self) -> list[Size]:
        sizes = [Size("number of ranks", len(self.ranks))]
        sizes += [Size(name, len(groups[0])) for name, groups in self._partitions.items() if name != "all ranks"]
        sizes += [Size("micro-batches", self._num_calls)]
        sizes += [Size(name, size) for name, size in batch_sizes(self.one_process.batch)]
        sizes += [Size(f"{name} of a rank", size) for name, size in batch_sizes(self.ranks[0].batch)]
        seen: set[tuple[str, int]] = set()
        return [
            size
            for size in sizes
            if size.value > 1
            and (key := (size.name.removesuffix(" of a rank"), size.value)) not in seen
            and not seen.add(key)  # type: ignore[func-returns-value]
        ]

    @cached_property
    def _facts(self) -> Facts:
        """Run one process on parts of the batch, and with each term of the loss alone."""
        facts = Facts(len(self.ranks), self._sizes, self._partitions)
        shares = self._batches_of_shares()
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
        return Facts(len(self.ranks), self._sizes, self._partitions, terms, parts, weights or [])

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

    def _batches_of_shares(self) -> list[tuple[Share, Any]]:
        """Return the different micro-batches of all ranks; ranks with the same tokens share them."""
        found: list[tuple[list[int], list[Any]]] = []
        for rank, measurement in enumerate(self.ranks):
            for ranks, batches in found:
                if _same(batches[0], measurement.batch):
                    ranks.append(rank)
                    break
            else:
                found.append(([rank], [measurement.batch]))
        return [
            (Share(tuple(ranks), number), micro_batch)
            for ranks, (batch,) in found
            for number, micro_batch in enumerate(_micro_batches(batch, self._num_calls))
        ]


def _reduction(copies: int, num_ranks: int, values: Sequence[float]) -> str:
    if copies == num_ranks:
        same = all(is_close(value, values[0], 1e-9) for value in values)
        return "that of every rank" if same else "the mean over the ranks"
    return "the sum over the ranks" if copies == 1 else f"the sum over the ranks / {copies}"


def _same(one: Any, other: Any) -> bool:
    pairs = zip(tensors_in(one), tensors_in(other), strict=True)
    return all(torch.equal(first, second) for (_, first), (_, second) in pairs)


def _micro_batches(batch: Any, count: int) -> list[Any]:
    """Cut the tensors of a batch along their first dim; a list that has this length is one of micro-batches."""
    if count <= 1:
        return [batch]
    if isinstance(batch, list) and len(batch) == count:
        return batch
    if isinstance(batch, Tensor):
        return list(batch.tensor_split(count)) if batch.ndim else [batch] * count
    if isinstance(batch, dict):
        cut = {key: _micro_batches(value, count) for key, value in batch.items()}
        return [{key: values[number] for key, values in cut.items()} for number in range(count)]
    if isinstance(batch, list | tuple):
        parts = [_micro_batches(value, count) for value in batch]
        return [type(batch)(values[number] for values in parts) for number in range(count)]
    return [batch] * count


def _sum(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum((item[name] for item in gradients[1:]), gradients[0][name]) for name in gradients[0]}
