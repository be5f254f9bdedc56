"""What is measured, and what the table and the file say about it."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from benchmarks.shapes import RowsShape, Shape


class Case(NamedTuple):
    """What contenders are compared in: a shape, by its name and sizes, a dtype, and what is done."""

    name: str
    shape: Shape | RowsShape
    dtype: torch.dtype
    mode: str

    @property
    def dtype_name(self) -> str:
        """As in "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def sizes(self) -> str:
        """As in "T 2048, D 512"."""
        letters = "RD" if isinstance(self.shape, RowsShape) else "TDFEK"
        return ", ".join(f"{letter} {size}" for letter, size in zip(letters, self.shape, strict=True))


@dataclass
class Result:
    """One contender in one case.

    Attributes:
        case: the case.
        contender: its name.
        kind: "maxmoe", "alternative" or "bound".
        seconds: of every call; empty where time was not the question.
        rounds: that it took part in.
        numbers: other measurements, by name.
        absent: why it was not measured.
    """

    case: Case
    contender: str
    kind: str
    seconds: list[float] = field(default_factory=list)
    rounds: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    absent: str | None = None

    @property
    def best(self) -> float:
        """The shortest time."""
        return min(self.seconds)

    def as_json(self) -> dict[str, object]:
        """For the file."""
        case = self.case
        labels = {"shape": case.name, "sizes": case.sizes, "dtype": case.dtype_name, "mode": case.mode}
        values = {"seconds": self.seconds, "rounds": self.rounds, "numbers": self.numbers, "absent": self.absent}
        return {**labels, "contender": self.contender, "kind": self.kind, **values}


def by_case(
    results: Iterable[Result], is_measured: Callable[[Result], object] = lambda result: result.seconds
) -> dict[Case, list[Result]]:
    """The results that were measured, timed unless told otherwise, together with those of the same case."""
    groups: dict[Case, list[Result]] = {}
    for result in filter(is_measured, results):
        groups.setdefault(result.case, []).append(result)
    return groups


def baseline_of(group: list[Result]) -> Result:
    """What the others are compared with: maxmoe, or else the first one."""
    return next((result for result in group if result.kind == "maxmoe"), group[0])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of equal width, without empty columns; the first column and those with words stand left, numbers right."""
    columns = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    aligned = []
    for number, column in enumerate(columns):
        width = max(map(len, column))
        is_left = number == 0 or any(cell[:1].isalpha() for cell in column[1:])
        cells = [column[0], "-" * width, *column[1:]]
        aligned.append([cell.ljust(width) if is_left else cell.rjust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def timing_report(results: list[Result], summary: Callable[[list[Result]], str]) -> str:
    """A table for each case, one over all of them, and who is missing."""
    parts = [f"{title(case)}\n{case_table(group)}" for case, group in by_case(results).items()]
    return "\n\n".join(filter(None, [*parts, summary(results), absent_lines(results)]))


def title(case: Case) -> str:
    """One line for a case."""
    return f"{case.name} ({case.sizes}), {case.dtype_name}, {case.mode}"


def case_table(group: list[Result]) -> str:
    """The contenders of one case; without maxmoe among them, the first one is what they are compared with."""
    baseline = baseline_of(group)
    bound = bound_of(group)
    header = ["contender", "best ms", "median ms", f"time / {baseline.contender}", "bound / time", "rounds"]
    rows = [
        [
            result.contender,
            milliseconds(result.best),
            milliseconds(statistics.median(result.seconds)),
            f"{result.best / baseline.best:.2f}",
            f"{bound.best / result.best:.2f}" if bound else "",
            str(result.rounds),
        ]
        for result in group
    ]
    return table(header, rows)


def bound_of(group: list[Result], dtype_name: str | None = None) -> Result | None:
    """The bound in the dtype of the case, or in another one."""
    bounds = [result for result in group if result.kind == "bound"]
    return next((each for each in bounds if dtype_name is None or each.contender.endswith(dtype_name)), None)


def summary_against_alternatives(results: list[Result]) -> str:
    """maxmoe, the best alternative and the bounds, a line for each case, and geometric means."""
    rows = []
    ratios: dict[str, list[float]] = {}
    for case, group in by_case(results).items():
        ours = next((result for result in group if result.kind == "maxmoe"), None)
        others = [result for result in group if result.kind == "alternative"]
        if ours is None:
            continue
        best = min(others, key=lambda result: result.best, default=None)
        if best is not None:
            ratios.setdefault(case.mode, []).append(best.best / ours.best)
        in_dtype, in_float32 = bound_of(group), bound_of(group, "float32")
        of_alternative = [best.contender, f"{best.best / ours.best:.2f}"] if best else ["none", ""]
        of_bounds = [
            f"{bound.best / ours.best:.2f}" if bound else ""
            for bound in (in_dtype, in_float32 if in_float32 is not in_dtype else None)
        ]
        rows.append([case.name, case.dtype_name, case.mode, milliseconds(ours.best), *of_alternative, *of_bounds])
    if not rows:
        return ""
    header = ["shape", "dtype", "mode", "maxmoe ms", "best alternative", "its time / maxmoe"]
    lines = ["Summary: best of all calls", table([*header, "bound / maxmoe", "float32 bound / maxmoe"], rows)]
    for mode, values in ratios.items():
        mean, least = math.exp(statistics.fmean(map(math.log, values))), min(values)
        lines.append(f"best alternative / maxmoe, {mode}: geometric mean {mean:.2f}, least {least:.2f}")
    return "\n".join(lines)


def absent_lines(results: list[Result]) -> str:
    """Who was not measured, and why."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.absent:
            modes = reasons.setdefault((result.contender, result.absent), [])
            if result.case.mode not in modes:
                modes.append(result.case.mode)
    lines = [f"  {name} ({'; '.join(modes)}): {reason}" for (name, reason), modes in reasons.items()]
    return "\n".join(["Not measured:", *lines]) if lines else ""


def milliseconds(seconds: float) -> str:
    """With the digits that mean something."""
    return f"{seconds * 1e3:.1f}" if seconds > 0.01 else f"{seconds * 1e3:.3f}"


def mebibytes(count: float) -> str:
    """A number of bytes."""
    return f"{count / 2**20:.1f}"
