"""Puts the parts that ranks hold beside the whole tensors of one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maxmoe.testing.explanation import Part
from maxmoe.testing.layout import blocks, closest_block, distance, indices_of_block, largest_of
from maxmoe.testing.measurement import Entries, Measurement, ParameterEntries

# Prefixes that wrappers of torch add to the names of parameters.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
FLOOR = 1e-2  # a tensor is compared on the scale of its largest entry, at least this part of that of all tensors


@dataclass(frozen=True)
class PlacedEntries:
    """Where the entries of a parameter of one rank lie in the whole parameter, and how far their values are off."""

    rank: int
    entries: ParameterEntries
    candidates: list[Tensor | None]
    error: float


def by_name(ranks: Sequence[Measurement], names: Sequence[str]) -> dict[str, dict[int, ParameterEntries]]:
    """Return the parameters of all ranks by name, as in one process if only wrappers have changed it, and by rank."""
    found: dict[str, dict[int, ParameterEntries]] = {}
    for rank, measurement in enumerate(ranks):
        matching = matching_names(list(measurement.parameters), names)
        for name, entries in measurement.parameters.items():
            found.setdefault(matching[name], {})[rank] = entries
    return found


def matching_names(wrapped: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the name in one process of each name on a rank, where wrappers may have added prefixes.

    A name that one process does not have is returned without prefixes. If several names differ in prefixes only, as of
    a child that is called `module`, the shortest one on the rank is the shortest one in one process, and so on.
    """
    here, there = _by_name_without_wrappers(names), _by_name_without_wrappers(wrapped)
    found: dict[str, str] = {}
    for bare, those in there.items():
        these = here.get(bare, [])
        if len(these) == len(those):
            found.update(zip(those, these, strict=True))
        else:
            found.update({name: name if name in these else bare for name in those})
    return found


def place(entries: Mapping[int, ParameterEntries], whole: Tensor, tolerance: float) -> list[PlacedEntries]:
    """Find the entries of each rank in a whole parameter, by the layout of a `DTensor` or by their values."""
    parts = {rank: item.value.values for rank, item in entries.items()}
    scale = largest_of(whole)
    placed = []
    for order, (rank, item) in enumerate(entries.items()):
        values = item.value.values
        if item.value.indices is not None:
            fits = torch.Size(item.value.shape) == whole.shape
            error = distance(values, whole.flatten()[item.value.indices]) if fits else float("inf")
            candidates: list[Tensor | None] = [item.value.indices]
        elif values.shape == whole.shape:
            error, candidates = distance(values, whole), [None]
        else:
            block, error = closest_block(list(parts.values()), order, whole)
            shapes = [tuple(part.shape) for part in parts.values()]
            candidates = [
                indices_of_block(whole.shape, other)
                for other in blocks(shapes, order, tuple(whole.shape))
                if block is not None and distance(values, whole[other]) <= error
            ]
        placed.append(
            PlacedEntries(rank, item, candidates, 0.0 if error <= tolerance * scale else error / (scale or 1.0))
        )
    return placed


def gradient_parts(placed: Sequence[PlacedEntries], expected: Tensor) -> list[Part]:
    """Return the gradients of the ranks, zeros for one that has none.

    Of several blocks with the same values, the one with the closest gradient counts.
    """
    parts = []
    for item in placed:
        gradient = item.entries.gradient or item.entries.value
        values = torch.zeros_like(gradient.values) if item.entries.gradient is None else gradient.values
        choices = [gradient.indices] if gradient.indices is not None else item.candidates
        options = [Part(item.rank, indices, values) for indices in choices]
        parts.append(min(options, key=lambda part: distance(part.values, part.of(expected))))
    return parts


def missing_entries(indices: Sequence[Tensor | None], size: int) -> int:
    """Return how many entries of a tensor no rank holds."""
    covered = torch.zeros(size, dtype=torch.bool)
    for index in indices:
        covered[slice(None) if index is None else index.flatten()] = True
    return int(size - covered.sum())


def compare_output(
    name: str, whole: Sequence[Mapping[str, Entries]], ranks: Sequence[Measurement]
) -> tuple[float, int] | None:
    """Compare an output of the model with the closest block of that of one process.

    Returns:
        Largest difference over the ranks and calls, and number of entries that no rank has; None if the outputs are no
        blocks of that of one process.
    """
    if len(whole) != 1:
        return None
    expected = whole[0][name].values
    calls = max(len(measurement.outputs) for measurement in ranks)
    errors, indices = [], []
    for call in range(calls):
        having = [item.outputs[call][name] for item in ranks if call < len(item.outputs) and name in item.outputs[call]]
        values = [item.values for item in having]
        for order, item in enumerate(having):
            if item.indices is not None:
                if torch.Size(item.shape) != expected.shape:
                    return None
                errors.append(distance(item.values, expected.flatten()[item.indices]))
                indices.append(item.indices)
                continue
            block, error = closest_block(values, order, expected)
            if block is None:
                return None
            errors.append(error)
            indices.append(indices_of_block(expected.shape, block))
    return (max(errors), missing_entries(indices, expected.numel())) if errors else None


def _by_name_without_wrappers(names: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=len):
        found.setdefault(".".join(part for part in name.split(".") if part not in WRAPPERS), []).append(name)
    return found
