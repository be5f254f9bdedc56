"""What differs before any gradient is compared: a random model, parameters before the step, buffers."""

from collections.abc import Sequence

from maxmoe.testing.layout import Entries, distance, largest_of, locate, matching_names, missing_entries
from maxmoe.testing.measurement import Measurement, ParameterEntries


def by_name(ranks: Sequence[Measurement], names: Sequence[str]) -> dict[str, dict[int, ParameterEntries]]:
    """Return the parameters of all ranks by name, as in one process if only wrappers have changed it, and by rank."""
    found: dict[str, dict[int, ParameterEntries]] = {}
    for rank, measurement in enumerate(ranks):
        for wrapped, name in matching_names(list(measurement.parameters), names).items():
            found.setdefault(name, {})[rank] = measurement.parameters[wrapped]
    return found


def random_parameters(first: Measurement, second: Measurement, tolerance: float) -> list[str]:
    """Describe what differs between two runs in one process."""
    texts = []
    for name, parameter in first.parameters.items():
        one, other = parameter.gradient, second.parameters[name].gradient
        if one is None or other is None:
            if one is not other:
                texts.append(f"{name}: one of the runs has no gradient.")
        elif (error := _error(other, one, tolerance)) > 1e-12:
            texts.append(f"{name}: the gradient differs by {error / (largest_of(one.values) or 1):.0e}.")
    return texts


def different_starts(one_process: Measurement, ranks: Sequence[Measurement], tolerance: float) -> list[str]:
    """Describe the parameters that differ from one process before the step."""
    everywhere = by_name(ranks, list(one_process.parameters))
    texts = [f"{name}: no rank has it." for name in one_process.parameters if name not in everywhere]
    for name, entries in everywhere.items():
        if name not in one_process.parameters:
            texts.append(f"{name}: rank {min(entries)} has it, one process does not.")
            continue
        whole = one_process.parameters[name].value.values
        located = dict(zip(entries, locate([item.value for item in entries.values()], whole), strict=True))
        wrong = [rank for rank, (_, error) in located.items() if error > tolerance * largest_of(whole)]
        where = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
        if any(not located[rank][0] for rank in wrong):
            got = entries[wrong[0]].value.shape
            texts.append(f"{name}: has shape {tuple(got)} on {where}, which does not fit into {tuple(whole.shape)}.")
        elif wrong:
            error = located[wrong[0]][1] / (largest_of(whole) or 1.0)
            texts.append(f"{name}: {where} of {len(ranks)} differ from one process by {error:.0e}.")
        elif count := missing_entries([indices for found, _ in located.values() for indices in found], whole.numel()):
            texts.append(f"{name}: no rank has {count} of {whole.numel()} entries.")
    return texts


def different_buffers(one_process: Measurement, ranks: Sequence[Measurement], tolerance: float) -> list[str]:
    """Describe the buffers that have the shapes, but not the values of one process, before or after the step."""
    texts: dict[str, str] = {}
    for when, expected in one_process.buffers.items():
        wrong: dict[str, list[str]] = {}
        for rank, measurement in enumerate(ranks):
            buffers = measurement.buffers[when]
            for wrapped, name in matching_names(list(buffers), list(expected)).items():
                has_shape = name in expected and buffers[wrapped].values.shape == expected[name].values.shape
                if has_shape and _error(buffers[wrapped], expected[name], tolerance):
                    wrong.setdefault(name, []).append(str(rank))
        for name, where in wrong.items():
            text = f"The buffer {name} differs from one process {when} the step on rank {', '.join(where)}."
            texts.setdefault(name, text)
    return list(texts.values())


def _error(entries: Entries, expected: Entries, tolerance: float) -> float:
    """Return the largest difference, 0 for rounding and for complex numbers."""
    if expected.values.is_complex():
        return 0.0
    error = distance(entries.values, expected.values)
    return error if error > tolerance * largest_of(expected.values) else 0.0
