"""Results, and their text in tables and files."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from benchmarks.shapes import LETTERS, AnyShape


class Case(NamedTuple):
    """A case in which contenders are compared: name and sizes of a shape, a dtype, and a mode."""

    name: str
    shape: AnyShape
    dtype: torch.dtype
    mode: str

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, such as "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def sizes(self) -> str:
        """Sizes, such as "T 2048, D 512"."""
        return ", ".join(f"{LETTERS[name]} {size}" for name, size in self.shape._asdict().items())


@dataclass
class Result:
    """The result of one contender in one case.

    Attributes:
        case: the case.
        contender: name of the contender.
        kind: "maxmoe", "alternative", "part" (of maxmoe) or "bound".
        seconds: time of every call; empty if calls are not timed.
        rounds: number of rounds.
        numbers: other measurements, by name.
        absent: reason why it was not measured.
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
        """The dict for results.json."""
        case = self.case
        labels = {"shape": case.name, "sizes": case.sizes, "dtype": case.dtype_name, "mode": case.mode}
        values = {"seconds": self.seconds, "rounds": self.rounds, "numbers": self.numbers, "absent": self.absent}
        return {**labels, "contender": self.contender, "kind": self.kind, **values}


def by_case(
    results: Iterable[Result], is_measured: Callable[[Result], object] = lambda result: result.seconds
) -> dict[Case, list[Result]]:
    """The measured results, by default the timed ones, grouped by case."""
    groups: dict[Case, list[Result]] = {}
    for result in filter(is_measured, results):
        groups.setdefault(result.case, []).append(result)
    return groups


def best_times(results: Iterable[Result], names: Sequence[str]) -> Iterator[tuple[Case, list[float]]]:
    """The best times of some contenders, in every case in which all of them were timed."""
    for case, group in by_case(results).items():
        times = {result.contender: result.best for result in group}
        if times.keys() >= set(names):
            yield case, [times[name] for name in names]


def baseline_of(group: list[Result]) -> Result:
    """The reference of a comparison: maxmoe, or else the first contender."""
    return next((result for result in group if result.kind == "maxmoe"), group[0])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of equal width, without empty columns; the first column and text are aligned left, numbers right."""
    columns = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    aligned = []
    for number, column in enumerate(columns):
        width = max(map(len, column))
        is_left = number == 0 or any(cell[:1].isalpha() for cell in column[1:])
        cells = [column[0], "-" * width, *column[1:]]
        aligned.append([cell.ljust(width) if is_left else cell.rjust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def timing_report(results: list[Result], summary: Callable[[list[Result]], str]) -> str:
    """A table for each case, a summary, and the contenders that were not measured."""
    parts = [f"{title(case)}\n{case_table(group)}" for case, group in by_case(results).items()]
    return "\n\n".join(filter(None, [*parts, summary(results), absent_lines(results)]))


def title(case: Case) -> str:
    """The title of a case, in one line."""
    return f"{case.name} ({case.sizes}), {case.dtype_name}, {case.mode}"


def case_table(group: list[Result]) -> str:
    """The contenders of one case, relative to maxmoe, or to the first one if maxmoe is not among them."""
    baseline = baseline_of(group)
    bounds = bounds_of(group)
    header = ["contender", "best ms", "median ms", f"time / {baseline.contender}"]
    header += [*(f"{name} / time" for name in bounds), "rounds"]
    rows = [
        [
            result.contender,
            milliseconds(result.best),
            milliseconds(statistics.median(result.seconds)),
            f"{result.best / baseline.best:.2f}",
            *(f"{bound / result.best:.2f}" for bound in bounds.values()),
            str(result.rounds),
        ]
        for result in group
    ]
    return table(header, rows)


def bounds_of(group: Iterable[Result]) -> dict[str, float]:
    """The best times of the bounds, by name."""
    return {each.contender.removeprefix("bound: "): each.best for each in group if each.kind == "bound"}


def bound_of(group: Iterable[Result], dtype_name: str) -> float | None:
    """The larger of the FLOP bound in this dtype and the bandwidth bound, None without either."""
    bounds = bounds_of(group)
    return max((bounds[name] for name in (f"mm {dtype_name}", "bandwidth") if name in bounds), default=None)


def summary_against_alternatives(results: list[Result]) -> str:
    """maxmoe, the best alternative and the bounds, a line for each case and layout, and geometric means."""
    rows = []
    ratios: dict[tuple[str, str], list[float]] = {}
    for case, group in by_case(results).items():
        best = min((each for each in group if each.kind == "alternative"), key=lambda each: each.best, default=None)
        names = [f"mm {case.dtype_name}", "mm float32" if case.dtype_name != "float32" else "", "bandwidth"]
        bounds = [*(bounds_of(group).get(name) for name in names), bound_of(group, case.dtype_name)]
        for ours in (result for result in group if result.kind == "maxmoe"):
            if best is not None:
                ratios.setdefault((ours.contender, case.mode), []).append(best.best / ours.best)
            of_alternative = [best.contender, f"{best.best / ours.best:.2f}"] if best else ["none", ""]
            of_bounds = [f"{bound / ours.best:.2f}" if bound else "" for bound in bounds]
            labels = [case.name, case.dtype_name, case.mode, ours.contender, milliseconds(ours.best)]
            rows.append([*labels, *of_alternative, *of_bounds])
    if not rows:
        return ""
    header = ["shape", "dtype", "mode", "ours", "ms", "best alternative", "its time / ours", "FLOP bound / ours"]
    header += ["float32 FLOP bound / ours", "bandwidth bound / ours", "larger bound / ours"]
    lines = ["Summary: best of all calls", table(header, rows)]
    for (name, mode), values in ratios.items():
        mean, least = math.exp(statistics.fmean(map(math.log, values))), min(values)
        lines.append(f"best alternative / {name}, {mode}: geometric mean {mean:.2f}, least {least:.2f}")
    return "\n".join(lines)


def absent_lines(results: list[Result]) -> str:
    """The contenders that were not measured, with reasons."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.absent:
            modes = reasons.setdefault((result.contender, result.absent), [])
            if result.case.mode not in modes:
                modes.append(result.case.mode)
    lines = [f"  {name} ({'; '.join(modes)}): {reason}" for (name, reason), modes in reasons.items()]
    return "\n".join(["Not measured:", *lines]) if lines else ""


def milliseconds(seconds: float) -> str:
    """Format a number with its significant digits."""
    return f"{seconds * 1e3:.1f}" if seconds > 0.01 else f"{seconds * 1e3:.3f}"


def mebibytes(count: float) -> str:
    """A number of bytes."""
    return f"{count / 2**20:.1f}"
