"""Outputs of the modules of a model on the ranks beside one process: the module in which a forward goes wrong."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from maxmoe._torch.autograd import is_backward_running
from maxmoe.testing.batches import tensors_in
from maxmoe.testing.layout import Entries, distance, largest_of, locate, matching_names

# Floating-point tensors of an output by their place.
Outputs = dict[str, Entries]
# By the name of a module, in the order in which the first calls end; the outputs of each call.
CallsOfModules = dict[str, list[Outputs]]


def outputs_of(output: Any) -> Outputs:
    """Copy the floating-point tensors of an output that have dims."""
    return {
        f"output{place}": Entries.of(tensor)
        for place, tensor in tensors_in(output).items()
        if tensor.is_floating_point() and tensor.ndim
    }


@contextmanager
def recorded(model: nn.Module) -> Iterator[CallsOfModules]:
    """Record the outputs of all modules within a model, without the calls that a backward recomputes."""
    calls: CallsOfModules = {}

    def recorder(name: str) -> Callable[..., None]:
        def record(_module: nn.Module, _arguments: Any, output: Any) -> None:
            if not is_backward_running():
                calls.setdefault(name, []).append(outputs_of(output))

        return record

    handles = [module.register_forward_hook(recorder(name)) for name, module in model.named_modules() if name]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def first_wrong_module(one_process: CallsOfModules, ranks: Sequence[CallsOfModules], tolerance: float) -> str:
    """Return the first module with another output than in one process, in the order of the forward; "" if none has.

    What differs within a module with right outputs is not a mistake: a block may compute its parts in another way on
    several ranks. Modules whose outputs are not slices of the outputs of one process are not compared.
    """
    names = [matching_names([*calls], [*one_process]) for calls in ranks]
    errors: dict[str, float] = {}
    for name, expected in one_process.items():
        pairs = ((found, own) for found, own in zip(ranks, names, strict=True))
        calls = [found[wrapped] for found, own in pairs for wrapped in own if own[wrapped] == name]
        error = _error_of_calls(expected, calls, tolerance)
        if error is not None:
            errors[name] = error
    for name, error in errors.items():
        parts = name.split(".")
        outer = (".".join(parts[:length]) for length in range(1, len(parts)))
        if error > tolerance and not any(errors.get(path, error) <= tolerance for path in outer):
            return name
    return ""


def _error_of_calls(expected: Sequence[Outputs], ranks: Sequence[Sequence[Outputs]], tolerance: float) -> float | None:
    """Return the largest error in the calls of a module; None if none can be compared."""
    found: list[float] = []
    for number, outputs in enumerate(expected):
        # A rank calls the module once for each micro-batch where one process calls it once.
        calls = zip(*(calls[number :: len(expected)] for calls in ranks), strict=False)
        for call in calls:
            errors = (_error(name, outputs, call, tolerance) for name in outputs)
            found.extend(error for error in errors if error is not None)
    return max(found, default=None)


def _error(name: str, outputs: Mapping[str, Entries], call: Sequence[Outputs], tolerance: float) -> float | None:
    """Return the error of a tensor in a call, relative to its largest entry; 0 if the ranks have summands of it."""
    whole, parts = outputs[name].values, [found[name] for found in call if name in found]
    located = locate(parts, whole)
    if not located or not all(candidates for candidates, _ in located):
        return None
    scale = largest_of(whole) or 1.0
    error = max(own for _, own in located) / scale
    if error > tolerance and all(part.indices is None and part.shape == whole.shape for part in parts):
        total = parts[0].values.double().clone()
        for part in parts[1:]:
            total += part.values
        if distance(total, whole) <= tolerance * scale:
            return 0.0
    return error
