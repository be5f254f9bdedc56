"""The FLOP bound: the same number of multiplications and additions as plain matrix products."""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.contender import Contender
from benchmarks.problem import Problem


class DenseBound(Contender):
    """`torch.mm` of all R rows with one expert's matrices: three forward, six backward, into allocated memory.

    Args:
        dtype: dtype of the products; float32 beside a 16-bit dtype shows the speed of the machine if torch has no fast
            product for the latter.
    """

    kind = "bound"
    weight_copies = 0

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = f"bound: mm {str(dtype).removeprefix('torch.')}"

    def prepare(self, problem: Problem) -> None:
        """See `Contender`."""
        F, K = problem.shape.intermediate_size, problem.shape.top_k
        self.rows = problem.x.to(self.dtype).repeat(K, 1)
        self.gate, self.up, self.down = (
            matrices[0].to(self.dtype).clone() for matrices in (problem.gate, problem.up, problem.down)
        )
        # One result for each product, of the size [R, F], [R, D] or a matrix's. Zeros, so that their pages are mapped
        # before the clock starts.
        self.wide = [self.rows.new_empty(len(self.rows), F).normal_() for _ in range(3)]
        self.narrow = [torch.zeros_like(self.rows) for _ in range(3)]
        self.of_matrices = [torch.zeros_like(matrix) for matrix in (self.gate, self.up, self.down)]

    def parameters(self) -> Sequence[Tensor]:
        """See `Contender`."""
        return [self.gate, self.up, self.down]

    def forward(self) -> Tensor:
        """See `Contender`; the activation is left out."""
        with torch.no_grad():
            torch.mm(self.rows, self.gate, out=self.wide[0])
            torch.mm(self.rows, self.up, out=self.wide[1])
            return torch.mm(self.wide[2], self.down, out=self.narrow[0])

    def step(self) -> tuple[Tensor, Sequence[Tensor]]:
        """See `Contender`; the activation is left out."""
        output = self.forward()
        grad_output = self.rows
        with torch.no_grad():
            torch.mm(grad_output, self.down.t(), out=self.wide[2])
            torch.mm(self.wide[0].t(), grad_output, out=self.of_matrices[2])
            torch.mm(self.wide[0], self.gate.t(), out=self.narrow[1])
            torch.mm(self.wide[1], self.up.t(), out=self.narrow[2])
            torch.mm(self.rows.t(), self.wide[0], out=self.of_matrices[0])
            torch.mm(self.rows.t(), self.wide[1], out=self.of_matrices[1])
        return output, [*self.narrow[1:], *self.of_matrices]
