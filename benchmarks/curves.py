"""Results over a size that varies: panels and tables, one for each shape, dtype and mode."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from benchmarks.figures import Curve, Curves
from benchmarks.results import Case, Result, by_case, table


class Axes(NamedTuple):
    """The axes of curves.

    Attributes:
        x_label: label of the size that varies.
        x: returns the size of a case.
        y_label: label of the measured number.
        y: returns the number in a result.
        y_scale: "log" or "linear".
        ratios: additional columns of the table, by name, computed from the results of one case.
    """

    x_label: str
    x: Callable[[Case], float]
    y_label: str
    y: Callable[[Result], float]
    y_scale: str
    ratios: Callable[[list[Result]], Mapping[str, float]]


def points(results: Iterable[Result]) -> dict[str, list[list[Result]]]:
    """The results of every case, by the title of its panel."""
    groups: dict[tuple[str, str, str], list[list[Result]]] = {}
    for case, group in by_case(results).items():
        groups.setdefault((case.name, case.dtype_name, case.mode), []).append(group)
    return {panel_title([group[0].case for group in panel]): panel for panel in groups.values()}


def panel_title(cases: list[Case]) -> str:
    """A title for cases of different sizes: the sizes that all of them share."""
    sizes = [case.sizes.split(", ") for case in cases]
    shared = [size for size in sizes[0] if all(size in others for others in sizes)]
    return f"{cases[0].name} ({', '.join(shared)}), {cases[0].dtype_name}, {cases[0].mode}"


def panels(results: Iterable[Result], axes: Axes) -> list[Curves]:
    """A curve for each contender."""
    found = []
    for title, groups in points(results).items():
        curves: dict[str, Curve] = {}
        for result in (result for group in groups for result in group):
            curve = curves.setdefault(result.contender, Curve(result.contender, result.kind, [], []))
            curve.x.append(axes.x(result.case))
            curve.y.append(axes.y(result))
        found.append(Curves(title, axes.x_label, axes.y_label, axes.y_scale, list(curves.values())))
    return found


def tables(results: Iterable[Result], axes: Axes) -> str:
    """A line for each size, a column for each contender."""
    parts = []
    for title, groups in points(results).items():
        names = list(dict.fromkeys(result.contender for group in groups for result in group))
        ratios = [axes.ratios(group) for group in groups]
        more = list(dict.fromkeys(name for each in ratios for name in each))
        rows = []
        for group, of_group in zip(groups, ratios, strict=True):
            numbers = {result.contender: f"{axes.y(result):.3g}" for result in group}
            numbers |= {name: f"{ratio:.2f}" for name, ratio in of_group.items()}
            rows.append([f"{axes.x(group[0].case):g}", *(numbers.get(name, "") for name in [*names, *more])])
        parts.append(f"{title}: {axes.y_label}\n{table([axes.x_label, *names, *more], rows)}")
    return "\n\n".join(parts)
