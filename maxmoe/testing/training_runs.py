"""`compare_ranks`: runs a training step in one process and on several ranks, and compares them."""

import pickle
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe.checks.fields import check_int, check_number
from maxmoe.ranks.failures import RankError
from maxmoe.ranks.rank_processes import RankProcesses
from maxmoe.testing.comparison import RankComparer, compare_steps
from maxmoe.testing.measurement import Training, measure_one_process, measure_rank
from maxmoe.testing.report import RankComparison, Verdict
from maxmoe.testing.run_facts import shared_masks
from maxmoe.testing.starts import different_starts, random_parameters

# Largest difference that is taken for rounding, relative to the largest entry of a tensor.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}

REASON = re.compile(r"^\S*(Error|Exception)\b.*$", re.MULTILINE)  # last line of a traceback


def compare_ranks(
    build_model: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module], Any],
    make_batch: Callable[[int, int], Any],
    loss: Callable[[Any, Any], Tensor | Mapping[str, Tensor]],
    num_ranks: int = 2,
    *,
    step: Callable[[Any, Any], Tensor | Mapping[str, Tensor] | None] | None = None,
    make_update: Callable[[Any], Callable[[], object]] | None = None,
    steps: int = 1,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    timeout: float = 300.0,
) -> RankComparison:
    """Compare training steps on several ranks with the same steps in one process.

    Starts one process without `torch.distributed`, then `num_ranks` processes with gloo on the CPU. One process runs
    ``loss(model, batch).backward()`` with the whole batch, each rank with its part of the batch and the model that
    `parallelize` returns. The gradients of every rank must then be the gradients of one process: whole for an ordinary
    parameter, the shard of the rank for a `DTensor` and for a parameter that is a block of the whole parameter. The
    loss of one process must be the sum or the mean over the ranks. The model may be of any library. Dropout is off.

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
        make_update: function of the model, as built in one process and as `parallelize` returns it on a rank, that
            returns a function without arguments: it updates the parameters from the gradients and clears these.
        steps: number of steps. The updates between them, and the gradients of each, are compared: clipping, optimizer
            state, loss scaling, buffers, whatever ranks keep from one step to the next. The batch stays the same.
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
    training = Training(build_model, parallelize, make_batch, loss, step, make_update, steps)
    check_int("num_ranks", num_ranks, at_least=2)
    check_int("steps", steps, at_least=1)
    check_number("timeout", timeout, above=0.0)
    if steps > 1 and make_update is None:
        raise ValueError(f"{steps} steps need make_update, got None")
    if dtype is not None and dtype not in TOLERANCES:
        raise ValueError(f"dtype must be {', '.join(map(str, TOLERANCES))} or None, got {dtype!r}")
    if tolerance is not None and not (isinstance(tolerance, int | float) and 0 < tolerance < 1):
        raise ValueError(f"tolerance must be a number above 0 and below 1 or None, got {tolerance!r}")
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
        """Compare in float64, or in float32 if the model cannot run in float64."""
        __tracebackhide__ = True
        if self.dtype is not None:
            return self._compare(self.dtype)
        try:
            found = self._compare(torch.float64)
        except RankError as error:
            reason = REASON.search(str(error))
            if reason is None:  # a rank died or hung
                raise
            with suppress(RankError):
                found = self._compare(torch.float32)
                note = f"Compared in float32, because the model cannot run in float64: {reason.group()}."
                return replace(found, notes=(note, *found.notes))
            raise
        with suppress(RankError):
            if found.verdict == "different" and self._compare(torch.float32).equal:  # some operators of torch do so
                note = "All are equal in float32: the difference is specific to float64, or smaller than the tolerance."
                return replace(found, notes=(*found.notes, note))
        return found

    def _compare(self, dtype: torch.dtype) -> RankComparison:
        """Run one process and the ranks, and compare them."""
        __tracebackhide__ = True
        steps, again = self.processes.run_alone(measure_one_process, self.training, dtype)
        first = steps[0]
        notes: list[str] = []
        if first.narrow:
            narrow = str(first.narrow[0]).removeprefix("torch.")
            notes.append(f"The model computes in {narrow} in places, first in the function {first.narrow[1]}.")
        tolerance = self.tolerance or TOLERANCES[first.narrow[0] if first.narrow else dtype]

        def stopped(verdict: Verdict) -> RankComparison:
            named = tuple(culprits[:8])
            return RankComparison(verdict, self.num_ranks, dtype, tolerance, culprits=named, notes=tuple(notes))

        if culprits := random_parameters(first, again, tolerance):
            if self.training.has_dropout:
                return replace(self, training=replace(self.training, has_dropout=False))._compare(dtype)
            return stopped("random")
        ranks = self.processes.run(measure_rank, self.num_ranks, self.training, dtype)
        first_of_ranks = [steps_of_rank[0] for steps_of_rank in ranks]
        if culprits := different_starts(first, first_of_ranks, tolerance):
            if self.training.vary_constants:  # parallelize may initialize constants once more
                return replace(self, training=replace(self.training, vary_constants=False))._compare(dtype)
            return stopped("different start")
        if not self.training.has_dropout:
            notes += ["Compared without dropout.", *shared_masks(first_of_ranks)]
        comparers = []
        for number, (one_process, *of_ranks) in enumerate(zip(steps, *ranks, strict=True)):
            training, before = replace(self.training, steps=number + 1), steps[number - 1] if number else None
            run = training, self.processes, one_process, of_ranks, dtype, tolerance, notes
            comparers.append(RankComparer(*run, before=before))
        return compare_steps(comparers)


def _check_functions(training: Training) -> None:
    for name in ("build_model", "parallelize", "make_batch", "loss", "step", "make_update"):
        function = getattr(training, name)
        if function is None and name in ("step", "make_update"):
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
