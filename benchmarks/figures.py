"""The picture of a run: horizontal bars or curves in panels."""

import io
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.results import Case, Result, baseline_of, by_case

COLORS = {"maxmoe": "#1b6ca8", "part": "#7fb2d6", "alternative": "#9aa5b1", "bound": "#b5541c"}
# Colors of several curves of one kind.
SHADES = {
    "maxmoe": ["#1b6ca8", "#2fa4b5", "#6a4fa3"],
    "alternative": ["#4d5661", "#9aa5b1"],
    "bound": ["#b5541c", "#e0a030"],
}
CURVES_HEIGHT = 17.0

# Bars are cut at this multiple of their reference, and bounds at this factor below the lowest other curve: longer ones
# would flatten the rest.
LONGEST = 5.0


class Bar(NamedTuple):
    """A name, a length, and a kind: a key of COLORS."""

    name: str
    value: float
    kind: str


class Panel(NamedTuple):
    """Bars in groups, each under its heading."""

    title: str
    label: str
    groups: dict[str, list[Bar]]


class Curve(NamedTuple):
    """A name, a kind (a key of SHADES), and points."""

    name: str
    kind: str
    x: list[float]
    y: list[float]


class Curves(NamedTuple):
    """Curves over a logarithmic axis, whose ticks are the numbers of the first curve."""

    title: str
    x_label: str
    y_label: str
    y_scale: str
    curves: list[Curve]


def time_panels(results: Iterable[Result]) -> list[Panel]:
    """Times relative to maxmoe."""
    bars, label = {}, ""
    for case, group in by_case(results).items():
        baseline = baseline_of(group)
        bars[case] = [Bar(result.contender, result.best / baseline.best, result.kind) for result in group]
        label = f"time / {baseline.contender}; shorter is faster"
    return panels_by_mode(label, bars)


def panels_by_mode(label: str, bars: dict[Case, list[Bar]]) -> list[Panel]:
    """One panel for each mode and dtype, in it one group for each shape."""
    panels: dict[tuple[str, str], Panel] = {}
    for case, of_case in bars.items():
        key = (case.mode, case.dtype_name)
        panel = panels.setdefault(key, Panel(", ".join(key), label, {}))
        panel.groups[f"{case.name}: {case.sizes}"] = of_case
    modes = list(dict.fromkeys(mode for mode, _ in panels))
    return [panels[key] for key in sorted(panels, key=lambda key: modes.index(key[0]))]


def draw(path: Path, heading: str, panels: Sequence[Panel | Curves]) -> None:
    """Draw the panels: curves below each other, so that a page shows them large, and bars in two columns.

    Args:
        path: path of the PNG.
        heading: text above the panels.
        panels: at least one.
    """
    columns = 1 if any(isinstance(panel, Curves) for panel in panels) else min(len(panels), 2)
    rows = [panels[first : first + columns] for first in range(0, len(panels), columns)]
    lines = [max(map(_num_lines, row)) for row in rows]
    height = 0.6 + sum(0.8 + 0.24 * number for number in lines)
    figure = Figure(figsize=(7.5 * columns, height), layout="constrained")
    figure.suptitle(heading, fontsize=13)
    ratios = [3 + number for number in lines]
    grid = figure.subplots(len(rows), columns, squeeze=False, height_ratios=ratios)
    for row, panels_of_row, number in zip(grid, rows, lines, strict=True):
        for axes, panel in zip(row, panels_of_row, strict=False):
            if isinstance(panel, Curves):
                _draw_curves(axes, panel)
            else:
                _draw_bars(axes, panel, number)
        for axes in row[len(panels_of_row) :]:
            axes.remove()
    # Drawn in memory, so that a full disk raises a plain OSError.
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    path.write_bytes(stream.getvalue())


def _num_lines(panel: Panel | Curves) -> float:
    if isinstance(panel, Curves):
        return CURVES_HEIGHT
    return sum(len(bars) + 1.6 for bars in panel.groups.values())


def _draw_bars(axes: Axes, panel: Panel, num_lines: float) -> None:
    values = [bar.value for bars in panel.groups.values() for bar in bars]
    end = min(1.12 * max(*values, 1), LONGEST)
    on_white: dict[str, Any] = {"va": "center", "bbox": {"color": "white", "pad": 0.5}}
    names, places, place = [], [], 0.0
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
    for heading, bars in panel.groups.items():
        axes.text(0.01 * end, place, heading, fontweight="bold", fontsize=9, **on_white)
        for bar in bars:
            place += 1
            axes.barh(place, min(bar.value, end), height=0.75, color=COLORS[bar.kind])
            text = f"{bar.value:.2f}" if bar.value <= end else f"{bar.value:.1f} (cut off)"
            if bar.value > 0.93 * end:
                inside = min(bar.value, end) - 0.01 * end
                axes.text(inside, place, text, fontsize=8, ha="right", va="center", color="white")
            else:
                axes.text(max(bar.value, 0) + 0.01 * end, place, text, fontsize=8, **on_white)
            names.append(bar.name)
            places.append(place)
        place += 1.6
    axes.set(xlim=(0, end), ylim=(num_lines - 0.6, -0.8), xlabel=panel.label)
    axes.set_yticks(places, names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_title(panel.title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_curves(axes: Axes, panel: Curves) -> None:
    used = {kind: count() for kind in SHADES}
    ends: list[tuple[str, str, Line2D]] = []
    for name, kind, x, y in panel.curves:
        shades = SHADES[kind]
        color = shades[next(used[kind]) % len(shades)]
        is_bound = kind == "bound"
        line: dict[str, Any] = {"ls": "--", "lw": 1.2} if is_bound else {"marker": "o", "markersize": 3.5}
        ends.append((name, color, axes.plot(x, y, color=color, **line)[0]))
    axes.set_xscale("log", base=2)
    axes.set_yscale(panel.y_scale)
    ticks = sorted(panel.curves[0].x)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=10, rotation=90)
    axes.set_xticks([], minor=True)
    lowest = min((min(curve.y) for curve in panel.curves if curve.kind != "bound"), default=None)
    if panel.y_scale == "linear":
        axes.set_ylim(bottom=0)
    elif lowest is not None:
        axes.set_ylim(bottom=lowest / LONGEST)
    axes.grid(color="#e5e8eb", linewidth=0.6)
    axes.tick_params(axis="y", labelsize=11)
    axes.set_xlabel(panel.x_label, fontsize=12)
    axes.set_ylabel(panel.y_label, fontsize=12)
    axes.set_title(panel.title, fontsize=13)
    axes.spines[["top", "right"]].set_visible(False)
    _name_ends(axes, ends)


def _name_ends(axes: Axes, ends: list[tuple[str, str, Line2D]]) -> None:
    """Write the name of each curve at its right end, or above an overlapping name."""
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [min(max(float(to_axes.transform(np.asarray(line.get_xydata())[-1])[1]), 0), 1) for _, _, line in ends]
    lowest = -1.0
    for height, (name, color, _) in sorted(zip(heights, ends, strict=True), key=lambda pair: pair[0]):
        lowest = max(height, lowest + 0.06)
        axes.annotate(
            name, (1.01, lowest), xycoords="axes fraction", va="center", fontsize=11, color=color, annotation_clip=False
        )
