"""Puts the parts that ranks hold beside the whole tensors of one process."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maxmoe.testing.explanation import Part
from maxmoe.testing.layout import blocks, closest_block, distance, indices_of_block
from maxmoe.testing.measurement import Entries, Measurement, ParameterEntries, tensors_in

# Prefixes that wrappers of torch add to the names of parameters.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
FLOOR = 1e-2  # a tensor is compared on the scale of its largest entry, at least this part of that of all tensors


@dataclass(frozen=True)
class Placed:
    """Where the entries of a parameter of one rank lie in the whole parameter, and how far their values are off."""

    rank: int
    entries: ParameterEntries
    candidates: list[Tensor | None]
    error: float


def by_name(ranks: Sequence[Measurement], names: Sequence[str]) -> dict[str, dict[int, ParameterEntries]]:
    """Return the parameters of all ranks by name, as in one process if only a wrapper has changed it, and by rank."""
    found: dict[str, dict[int, ParameterEntries]] = {}
    for rank, measurement in enumerate(ranks):
        for name, entries in measurement.parameters.items():
            found.setdefault(name if name in names else _without_wrappers(name), {})[rank] = entries
    return found


def place(entries: Mapping[int, ParameterEntries], whole: Tensor, tolerance: float) -> list[Placed]:
    """Find the entries of each rank in a whole parameter, by the layout of a `DTensor` or by their values."""
    parts = {rank: item.value.values for rank, item in entries.items()}
    scale = float(whole.abs().max()) if whole.numel() else 0.0
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
        placed.append(Placed(rank, item, candidates, 0.0 if error <= tolerance * scale else error / (scale or 1.0)))
    return placed


def gradient_parts(placed: Sequence[Placed], expected: Tensor) -> list[Part]:
    """Return the gradients of the ranks that have one.

    Of several blocks with the same values, such as those of a bias of zeros, the one with the closest gradient counts.
    """
    parts = []
    for item in placed:
        gradient = item.entries.gradient
        if gradient is None:
            continue
        choices = [gradient.indices] if gradient.indices is not None else item.candidates
        options = [Part(item.rank, indices, gradient.values) for indices in choices]
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


def batch_sizes(batch: object) -> Iterator[tuple[str, int]]:
    """Yield the names of the dims of the largest tensor of a batch and their sizes."""
    tensors = [tensor for _, tensor in tensors_in(batch) if tensor.ndim]
    if not tensors:
        return
    shape = max(tensors, key=lambda tensor: tensor.ndim).shape
    yield "batch size", shape[0]
    if len(shape) > 1:
        yield "sequence length", shape[1]
        yield "number of tokens", shape[0] * shape[1]


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
