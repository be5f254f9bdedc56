"""The bandwidth bound: the weights that must be read and the gradients that must be written."""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.contender import Contender, Mode
from benchmarks.problem import Problem


class BandwidthBound(Contender):
    """`torch.sum` of the weights of the selected experts, `fill_` of allocated memory of the size of all gradients.

    Only experts that a token selects are read: once forward, and once more backward, which starts when the output is
    complete. Gradients are written for all experts, those without rows are zero. Rows are left out.
    """

    kind = "bound"
    name = "bound: bandwidth"

    def available(self, problem: Problem, mode: Mode) -> str | None:
        """See `Contender`."""
        self.writes = mode == "forward+backward"
        return None

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        self.weights = [problem.gate, problem.up, problem.down]
        self.runs = consecutive(problem.experts.unique().tolist())
        self.gradients = [torch.zeros_like(weight) for weight in self.weights] if self.writes else []

    def parameters(self) -> Sequence[Tensor]:
        """See `Contender`."""
        return self.weights

    def forward(self) -> Tensor:
        """See `Contender`; returns the sum of all weights as a placeholder."""
        sums = [as_float32(weight[run]).sum() for run in self.runs for weight in self.weights]
        return torch.stack(sums).sum()

    def step(self) -> tuple[Tensor, Sequence[Tensor]]:
        """See `Contender`; reads, reads and writes."""
        self.forward()
        return self.forward(), [gradient.fill_(0) for gradient in self.gradients]


def consecutive(numbers: Sequence[int]) -> list[slice]:
    """Merge ascending numbers into slices, as few as possible, because each slice is one call of torch."""
    breaks = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
    return [
        slice(numbers[first], numbers[end - 1] + 1)
        for first, end in zip([0, *breaks], [*breaks, len(numbers)], strict=True)
    ]


def as_float32(weights: Tensor) -> Tensor:
    """View the bytes as a wider type, because a sum of 16-bit numbers would convert them first."""
    is_even = weights.element_size() == 2 and weights[0].numel() % 2 == 0
    return weights.flatten().view(torch.float32) if is_even else weights
