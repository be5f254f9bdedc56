"""What `compare_ranks` has found, as an object that prints as a table."""

from dataclasses import dataclass
from typing import Literal

import torch

from maxmoe.text_table import paragraph, terminal_width, text_table

Verdict = Literal["equal", "different", "random", "different start", "not finite"]
Noun = Literal["gradient", "update"]
HEADS = {
    "equal": "equal",
    "different": "different",
    "random": "the model is random: two runs in one process differ",
    "different start": "parameters differ before the first step",
    "not finite": "one process is not finite",
}
COLUMNS = (
    "One process, ranks: value of a loss, norm of an output or {noun}; one number for all ranks, or one for each. "
    "Error: largest difference on any rank, divided by the largest entry in one process."
)
MAX_ROWS = 40  # of the printed table


@dataclass(frozen=True)
class Comparison:
    """Result for the loss, an output or a gradient.

    Attributes:
        name: name of the parameter for a gradient; "loss" or a term of it; "output" with the place of the tensor.
        error: largest difference over all ranks, relative to the largest entry in one process.
        one_process: norm in one process, the value itself for a loss.
        ranks: norm or value on the ranks: one number, or one for each rank if they differ.
        explanation: "" if it is right, otherwise what is wrong.
    """

    name: str
    error: float
    one_process: float
    ranks: tuple[float, ...]
    explanation: str = ""

    @property
    def equal(self) -> bool:
        """Whether all ranks have what one process has."""
        return not self.explanation


@dataclass(frozen=True)
class RankComparison:
    """Training step on several ranks beside the same step in one process.

    Attributes:
        verdict: "equal"; "different"; "random", if two runs in one process differ already, for example by dropout;
            "different start", if the ranks have other parameters than one process before the first step; "not finite",
            if the loss or a gradient of one process is infinite or NaN.
        num_ranks: number of ranks.
        dtype: dtype of the parameters and of the batch.
        tolerance: relative error below which a difference is rounding.
        loss: the loss, and the terms of a loss that has several.
        outputs: tensors that the model returns.
        gradients: gradients by parameter, in the order in which the backward computes them; for the noun "update" what
            the update after the step has added to the parameters.
        culprits: what is random, not finite, or differs before the first step.
        notes: facts about the comparison, such as why it is not in float64, and buffers that differ before or after the
            step.
        step: number of the step: the first one that differs, or the last one.
        noun: "update" if the gradients of the step are right, but not the update after it.
        first_wrong_module: name of the first module in the order of the forward whose output differs, if an output of
            the model differs, or the loss of a model that returns nothing else; "" if there is none.
    """

    verdict: Verdict
    num_ranks: int
    dtype: torch.dtype
    tolerance: float
    loss: tuple[Comparison, ...] = ()
    outputs: tuple[Comparison, ...] = ()
    gradients: tuple[Comparison, ...] = ()
    culprits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    step: int = 1
    noun: Noun = "gradient"
    first_wrong_module: str = ""

    @property
    def equal(self) -> bool:
        """Whether loss, outputs and all gradients are equal to one process."""
        return self.verdict == "equal"

    @property
    def differs(self) -> bool:
        """Whether a loss, output or gradient differs from one process. What is infinite or NaN in both does not."""
        return not all(item.equal for item in (*self.loss, *self.outputs, *self.gradients))

    @property
    def first_wrong(self) -> Comparison | None:
        """First wrong gradient in the order of the backward, None if all are right.

        The gradients before it are right, so that the mistake is between the parameter of the last right one and this.
        """
        return next((gradient for gradient in self.gradients if not gradient.equal), None)

    def raise_if_different(self) -> None:
        """Raise an AssertionError with the report unless the verdict is "equal"."""
        __tracebackhide__ = True  # for pytest
        if not self.equal:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        width = terminal_width()
        dtype = str(self.dtype).removeprefix("torch.")
        head = f"compare_ranks: {HEADS[self.verdict]}{self._place()}. {self.num_ranks} ranks beside one process"
        lines = [f"{head}, {dtype}, tolerance {self.tolerance:.0e}.", *self.culprits]
        if self.first_wrong_module:
            lines.append(f"The mistake is in the forward pass, first in the output of {self.first_wrong_module}.")
        elif wrong := [output.name for output in self.outputs if not output.equal]:
            lines.append(f"The mistake is in the forward pass: {', '.join(wrong)} differs.")
        lines += [*self._first_wrong(), *self.notes]
        text = "\n".join(paragraph(line, width=width) for line in lines)
        if not (self.loss or self.outputs or self.gradients):
            return text
        return f"{text}\n\n{self._table(width)}\n\n{paragraph(COLUMNS.format(noun=self.noun), width=width)}"

    def _place(self) -> str:
        if self.noun == "update":
            return f" in the update after step {self.step}"
        if self.step == 1:
            return ""
        return f" in {self.step} steps" if self.equal else f" in step {self.step}"

    def _first_wrong(self) -> list[str]:
        first = self.first_wrong
        if first is None:
            return []
        wrong = [gradient for gradient in self.gradients if not gradient.equal]
        alike = sum(gradient.explanation == first.explanation for gradient in wrong)
        return [
            f"First wrong {self.noun}, in the order of the backward: {first.name}: {first.explanation}.",
            f"{len(wrong)} of {len(self.gradients)} {self.noun}s are wrong, {alike} of them in this way.",
        ]

    def _table(self, width: int | None) -> str:
        rows = [*self.loss, *self.outputs, *self.gradients]
        left_out = len(rows) - MAX_ROWS
        if left_out > 0:
            rows = sorted(rows, key=lambda row: row.equal)[:MAX_ROWS]
        cells = [
            (
                row.name,
                f"{row.one_process:.6g}",
                " | ".join(f"{value:.6g}" for value in row.ranks) or "none",
                f"{row.error:.0e}" if row.error else "0",
                self._explanation(row),
            )
            for row in rows
        ]
        heading = ("", "one process", "ranks", "error", "explanation")
        table = text_table([heading, *cells], right=(1, 3), width=width)
        return f"{table}\n... and {left_out} rows more" if left_out > 0 else table

    def _explanation(self, row: Comparison) -> str:
        first = self.first_wrong
        if first is not None and row is not first and row.explanation == first.explanation:
            return f"as {first.name}"
        return row.explanation or "right"
