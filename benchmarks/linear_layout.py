"""The layout of `torch.nn.functional.linear`, with gate and up in one matrix, as in transformers and vLLM."""

from dataclasses import dataclass

from torch import Tensor

from benchmarks.problem import Problem


@dataclass(frozen=True, eq=False)
class LinearLayout:
    """The weights of a problem in that layout.

    Attributes:
        gate_up: ``(E, 2F, D)``, gate first.
        down: ``(E, D, F)``.
    """

    gate_up: Tensor
    down: Tensor


def to_linear_layout(problem: Problem) -> LinearLayout:
    """Return the weights; contenders that hold them for the same problem at the same time share one copy."""
    layout = problem.copies.get("linear")
    if not isinstance(layout, LinearLayout):
        E, D, F = problem.gate.shape
        gate_up = problem.gate.new_empty(E, 2 * F, D)
        gate_up[:, :F] = problem.gate.transpose(1, 2)
        gate_up[:, F:] = problem.up.transpose(1, 2)
        layout = LinearLayout(gate_up, problem.down.transpose(1, 2).contiguous())
        problem.copies["linear"] = layout
    return layout


def from_linear_layout(gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """Convert back, to the names and shapes of `Problem`."""
    gate, up = gate_up.transpose(1, 2).chunk(2, 2)
    return {"gate": gate, "up": up, "down": down.transpose(1, 2)}
