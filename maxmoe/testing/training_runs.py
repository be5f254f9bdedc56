"""`compare_ranks`: runs a training step in one process and on several ranks, and compares them."""

import pickle
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe.ranks.failures import RankError
from maxmoe.ranks.rank_processes import RankProcesses
from maxmoe.testing.assembly import by_name, matching_names, missing_entries, place
from maxmoe.testing.comparison import RankComparer
from maxmoe.testing.layout import distance, largest_of
from maxmoe.testing.measurement import Entries, Measurement, Training, measure_one_process, measure_rank
from maxmoe.testing.report import RankComparison

# Largest difference that is taken for rounding, relative to the largest entry of a tensor.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}

ABOUT_DTYPE = re.compile(r"^\S*(Error|Exception): .*(float64|[Dd]ouble|dtype)", re.MULTILINE)  # of a traceback


def compare_ranks(
    build_model: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module], Any],
    make_batch: Callable[[int, int], Any],
    loss: Callable[[Any, Any], Tensor | Mapping[str, Tensor]],
    num_ranks: int = 2,
    *,
    step: Callable[[Any, Any], Tensor | Mapping[str, Tensor] | None] | None = None,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    timeout: float = 300.0,
) -> RankComparison:
    """Compare a training step on several ranks with the same step in one process.

    Starts one process without `torch.distributed`, then `num_ranks` processes with gloo on the CPU. One process runs
    ``loss(model, batch).backward()`` with the whole batch. Each rank does so with its part of the batch and the model
    that `parallelize` returns. The gradients of every rank must then be those of one process: whole for an ordinary
    parameter, the shard of the rank for a `DTensor` and for a parameter that is a block of that of one process. The
    model may be of any library. A pytest test is::

        def test_ranks_train_as_one_process():
            compare_ranks(build_model, parallelize, make_batch, loss, num_ranks=4).raise_if_different()

    The loss of the ranks is right if their sum or their mean is that of one process; the report says which.

    Args:
        build_model: function that returns the model, on the CPU. Rank r is seeded with r before the call, one process
            with 0, as ranks have different seeds in training. A model whose initialization must be the same on all
            ranks calls `torch.manual_seed` itself. Small random values, the same ones everywhere, are then added to
            trained parameters that are zero or repeat their values, unless `parallelize` sets them once more.
        parallelize: function of the model that returns the model for training on this rank. `torch.distributed` is
            initialized. An object with `named_parameters`, such as a pipeline, will do if `step` is given.
        make_batch: function of the rank and the number of ranks that returns the batch of the rank, in any form;
            ``make_batch(0, 1)`` is the whole batch. Ranks that hold the same tokens, as in tensor parallelism, get the
            same batch. All processes have the same seed before the call, of torch, Python and NumPy.
        loss: function of model and batch that returns the loss, ``()``, or a dict of terms, whose sum is the loss. With
            terms, the explanations name the one that is wrong.
        num_ranks: number of ranks. A factor of 2 may have several causes: 3 or 4 ranks tell more.
        step: function of model and batch that runs forward and backward of one optimizer step on a rank if this is more
            than ``loss(model, batch).backward()``: micro-batches, reductions of gradients, a pipeline. Returns the
            loss of the step, as `loss` does, or None.
        dtype: dtype of parameters and batch; None for float64, or float32 if the model cannot run in float64. What
            differs in float64 is compared in float32 once more, and the report says if it is right there.
        tolerance: largest difference that counts as rounding, relative to the largest entry of a tensor; None for 1e-9
            in float64, 1e-4 if the model computes parts in float32.
        timeout: seconds for each start of processes.

    Returns:
        Loss, outputs and gradients side by side, the first wrong gradient, and what explains it.

    Raises:
        ValueError: if a function cannot be sent to other processes.
        RankError: if a process raises, dies or hangs, with its traceback.
    """
    __tracebackhide__ = True  # for pytest
    training = Training(build_model, parallelize, make_batch, loss, step)
    _check(num_ranks, dtype, tolerance, timeout)
    _check_functions(training)
    return Run(training, num_ranks, dtype, tolerance, RankProcesses(timeout=timeout, deadline=timeout)).compare()


@dataclass
class Run:
    """Settings of a comparison, see `compare_ranks`; `processes` runs the functions."""

    training: Training
    num_ranks: int
    dtype: torch.dtype | None
    tolerance: float | None
    processes: RankProcesses

    def compare(self) -> RankComparison:
        """Run one process and the ranks, and compare them."""
        __tracebackhide__ = True
        first, second, dtype, notes = self._one_process()
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = TOLERANCES[first.narrow[0] if first.narrow else dtype]
            if first.narrow:
                narrow = str(first.narrow[0]).removeprefix("torch.")
                notes.append(f"The model computes in {narrow} in places, first in the function {first.narrow[1]}.")
        random = tuple(_differences(first, second, tolerance))
        if random:
            return RankComparison("random", self.num_ranks, dtype, tolerance, culprits=random[:3], notes=tuple(notes))
        try:
            ranks = self.processes.run(measure_rank, self.num_ranks, self.training, dtype)
        except RankError as error:
            if self.dtype is not None or dtype == torch.float32 or not ABOUT_DTYPE.search(str(error)):
                raise
            found = replace(self, dtype=torch.float32).compare()
            return replace(found, notes=("Compared in float32, because the ranks cannot run in float64.", *found.notes))
        comparer = RankComparer(self.training, self.processes, first, ranks, dtype, tolerance, notes)
        culprits = tuple(different_starts(first, ranks, tolerance))
        if culprits and self.training.vary_constants:  # parallelize may initialize constants once more
            return replace(self, training=replace(self.training, vary_constants=False)).compare()
        if culprits:
            return RankComparison(
                "different start", self.num_ranks, dtype, tolerance, culprits=culprits[:8], notes=tuple(notes)
            )
        notes.extend(different_buffers(first, ranks, tolerance))
        found = comparer.comparison()
        return (
            found if found.equal or self.dtype is not None else replace(found, notes=found.notes + self._in_float32())
        )

    def _in_float32(self) -> tuple[str, ...]:
        """Return a note if the ranks are right in float32: some operators of torch do otherwise in float64."""
        with suppress(RankError):
            if replace(self, dtype=torch.float32).compare().equal:
                return (
                    "All are equal in float32: the difference is specific to float64, or smaller than the tolerance.",
                )
        return ()

    def _one_process(self) -> tuple[Measurement, Measurement, torch.dtype, list[str]]:
        """Run one process, in float64 if it can."""
        __tracebackhide__ = True
        dtype = self.dtype or torch.float64
        try:
            return *self.processes.run_alone(measure_one_process, self.training, dtype), dtype, []
        except RankError as error:
            if self.dtype is not None:
                raise
            reason = str(error).splitlines()[-1]
        dtype = torch.float32
        first, second = self.processes.run_alone(measure_one_process, self.training, dtype)
        return first, second, dtype, [f"Compared in float32, because one process cannot run in float64: {reason}."]


def different_starts(one_process: Measurement, ranks: Sequence[Measurement], tolerance: float) -> list[str]:
    """Describe the parameters that are not those of one process before the step."""
    everywhere = by_name(ranks, list(one_process.parameters))
    texts = [f"{name}: no rank has it." for name in one_process.parameters if name not in everywhere]
    for name, entries in everywhere.items():
        if name not in one_process.parameters:
            texts.append(f"{name}: rank {min(entries)} has it, one process does not.")
            continue
        whole = one_process.parameters[name].value.values
        shape, placed = whole.shape, place(entries, whole, tolerance)
        wrong = [item for item in placed if item.error > 0]
        if wrong:
            where = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(str(item.rank) for item in wrong)}"
            got = wrong[0].entries.value.shape
            if wrong[0].error == float("inf") and tuple(got) != tuple(shape):
                texts.append(f"{name}: has shape {got} on {where}, which is no part of {tuple(shape)}.")
            else:
                texts.append(f"{name}: {where} of {len(ranks)} differ from one process by {wrong[0].error:.0e}.")
        elif count := missing_entries([item for one in placed for item in one.candidates], shape.numel()):
            texts.append(f"{name}: no rank has {count} of {shape.numel()} entries.")
    return texts


def different_buffers(one_process: Measurement, ranks: Sequence[Measurement], tolerance: float) -> list[str]:
    """Describe the buffers that have the shapes, but not the values of one process, before or after the step."""
    found: dict[str, str] = {}
    before = one_process.buffers, [rank.buffers for rank in ranks]
    after = one_process.buffers_after, [rank.buffers_after for rank in ranks]
    for when, (expected, everywhere) in (("before", before), ("after", after)):
        for name, where in _ranks_with_others(expected, everywhere, tolerance).items():
            text = f"The buffer {name} differs from that of one process {when} the step on rank {where}."
            found.setdefault(name, text)
    return list(found.values())


def _ranks_with_others(
    expected: Mapping[str, Entries], everywhere: Sequence[Mapping[str, Entries]], tolerance: float
) -> dict[str, str]:
    """Return, by name, the ranks whose tensor has the expected shape, but not the expected values."""
    wrong: dict[str, list[str]] = {}
    for rank, tensors in enumerate(everywhere):
        for other, name in matching_names(list(tensors), list(expected)).items():
            values = tensors[other].values
            whole = expected[name].values if name in expected else values
            if (
                values.shape == whole.shape
                and not whole.is_complex()
                and distance(values, whole) > tolerance * largest_of(whole)
            ):
                wrong.setdefault(name, []).append(str(rank))
    return {name: ", ".join(numbers) for name, numbers in wrong.items()}


def _differences(first: Measurement, second: Measurement, tolerance: float) -> list[str]:
    """Describe what differs between two runs in one process."""
    texts = []
    for name, entries in first.parameters.items():
        pairs = [
            ("value before the step", entries.value, second.parameters[name].value),
            ("gradient", entries.gradient, second.parameters[name].gradient),
        ]
        for what, one, other in pairs:
            if one is None or other is None:
                if one is not other:
                    texts.append(f"{name}: one of the runs has no {what}.")
                continue
            scale = largest_of(one.values)
            error = distance(one.values, other.values)
            if error > tolerance * scale and error > 1e-12:
                texts.append(f"{name}: the {what} differs by {error / (scale or 1):.0e}.")
    return texts


def _check(num_ranks: Any, dtype: Any, tolerance: Any, timeout: Any) -> None:
    if not isinstance(num_ranks, int) or num_ranks < 2:
        raise ValueError(f"num_ranks must be an integer of at least 2, got {num_ranks!r}")
    if dtype is not None and dtype not in TOLERANCES:
        names = ", ".join(str(known) for known in TOLERANCES)
        raise ValueError(f"dtype must be {names} or None, got {dtype!r}")
    if tolerance is not None and not (isinstance(tolerance, int | float) and 0 < tolerance < 1):
        raise ValueError(f"tolerance must be a number above 0 and below 1 or None, got {tolerance!r}")
    if not (isinstance(timeout, int | float) and 0 < timeout < float("inf")):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")


def _check_functions(training: Training) -> None:
    for name in ("build_model", "parallelize", "make_batch", "loss", "step"):
        function = getattr(training, name)
        if function is None and name == "step":
            continue
        if not callable(function):
            raise TypeError(f"{name} must be a function, got {type(function).__name__}")
        try:
            pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError):
            is_importable = False
        else:  # the functions of a notebook are of a module without a file
            module = getattr(getattr(function, "func", function), "__module__", None)
            is_importable = module != "__main__" or hasattr(sys.modules[module], "__file__")
        if not is_importable:
            raise ValueError(
                f"{name} must be a function of a module in a file, which other processes can import, got {function!r}"
            )
