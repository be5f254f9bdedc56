"""Which matrices a parameter holds."""

from typing import NamedTuple

from torch import Tensor

from maxmoe.nn.declaration import FusedGate


class Matrix(NamedTuple):
    """The matrices in the last two dims of a parameter; all dims before them are stacked.

    Args:
        input_dim: the dim that is multiplied with the input: -1 in ``[out, in]``, the layout of `nn.Linear`; -2 in
            ``[in, out]``, that of the experts.
        fused_gate: how the matrices of gate and up lie in the dim of the outputs, which is twice as long then; None
            for a single matrix.
    """

    input_dim: int = -1
    fused_gate: FusedGate | None = None

    def views(self, tensor: Tensor) -> list[Tensor]:
        """View a tensor as matrices.

        Args:
            tensor: ``(..., out, in)`` or ``(..., in, out)``.

        Returns:
            ``(..., out, in)``; of a fused gate two of them, with half the outputs each.
        """
        matrices = tensor if self.input_dim == -1 else tensor.mT
        if self.fused_gate is None:
            return [matrices]
        if self.fused_gate == "interleaved":
            return [matrices[..., 0::2, :], matrices[..., 1::2, :]]
        return [*matrices.chunk(2, dim=-2)]

    def __str__(self) -> str:
        text = "[out, in]" if self.input_dim == -1 else "[in, out]"
        return text if self.fused_gate is None else f"{text}, gate and up {self.fused_gate}"
