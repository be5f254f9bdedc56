"""Which contenders are timed in a case: installed ones that fit into memory and have the results of the first one."""

import copy
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.contender import Contender, Mode, disagreement, runner, runner_by_turns
from benchmarks.problem import Problem
from benchmarks.timing import Runner

# Number of tensors of R rows of D + 2F numbers that a call needs at once; an upper bound over all contenders.
TENSORS_OF_ROWS = 4
# Usable share of the free memory; the allocator and the system need the rest.
USABLE = 0.95
# Number of random combinations of columns that replace a matrix in the comparison.
NUM_COMBINATIONS = 4


class Admission:
    """Turns the contenders of a case into runners.

    If the weights of all contenders fit into memory together, each holds its weights for the whole case; otherwise each
    is prepared when its turn begins and freed when it ends.

    Args:
        problem: inputs of the contenders.
        mode: forward, or forward and backward.
        tolerance: the largest relative error against the first one.
    """

    def __init__(self, problem: Problem, mode: Mode, tolerance: float) -> None:
        self.problem, self.mode, self.tolerance = problem, mode, tolerance
        self.free = USABLE * machine.available_memory()
        self.expected: dict[str, Tensor] | None = None

    def obstacle(self, contender: Contender) -> str | None:
        """Why a contender cannot be timed, None if it can."""
        reason = contender.available(self.problem, self.mode)
        needed = self._held(contender) + self._working_memory(contender)
        if reason is None and needed > self.free:
            needed, free = needed / 2**30, self.free / 2**30
            reason = f"does not fit into memory: needs about {needed:.1f} GiB, {free:.1f} GiB are free"
        return reason

    def runners(self, contenders: Sequence[Contender]) -> tuple[list[Runner], dict[str, str]]:
        """Runners of the contenders that can be timed; reasons why the others cannot, by name."""
        reasons = {contender.name: self.obstacle(contender) for contender in contenders}
        able = [contender for contender in contenders if reasons[contender.name] is None]
        fit_together = sum(map(self._held, able)) + max(map(self._working_memory, able), default=0) <= self.free
        runners = []
        for contender in able:
            prepared = copy.copy(contender)
            prepared.prepare(self.problem)
            seconds, reasons[contender.name] = self._check(prepared)
            if reasons[contender.name] is not None:
                continue
            runners.append(
                runner(prepared, self.mode) if fit_together else runner_by_turns(contender, self.problem, self.mode)
            )
            runners[-1].warm_up_seconds = seconds
        return runners, {name: reason for name, reason in reasons.items() if reason is not None}

    def _check(self, prepared: Contender) -> tuple[float | None, str | None]:
        """Seconds of the first call, and the error of its results, if any."""
        if prepared.kind not in ("maxmoe", "alternative"):
            return None, None
        start = time.perf_counter()
        results = prepared.results(self.mode)
        seconds = time.perf_counter() - start
        combined = combinations(results)
        self.expected = self.expected or combined
        return seconds, disagreement(combined, self.expected, self.tolerance)

    def _held(self, contender: Contender) -> int:
        return contender.weight_copies * self.problem.weight_bytes

    def _working_memory(self, contender: Contender) -> int:
        """Memory of one call: gradients, and tensors of the size of all rows."""
        _, D, F, _, _ = self.problem.shape
        of_rows = self.problem.shape.num_rows * (D + 2 * F) * self.problem.x.element_size()
        copies = contender.gradient_copies if self.mode == "forward+backward" else 0
        return copies * self.problem.weight_bytes + TENSORS_OF_ROWS * of_rows


def combinations(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same results with random combinations of the columns of each matrix in a stack of them.

    An error of a matrix gives an error of the same relative size, and the gradients of two contenders need not be in
    memory at the same time.
    """
    generator = torch.Generator().manual_seed(0)

    def combined(stack: Tensor) -> Tensor:
        factors = torch.randn(stack.shape[2], NUM_COMBINATIONS, generator=generator, dtype=torch.float64)
        return torch.stack([matrix.double() @ factors for matrix in stack.detach()])

    return {name: combined(value) if value.dim() == 3 else value for name, value in results.items()}
