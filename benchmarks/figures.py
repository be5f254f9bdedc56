"""The picture of a run: horizontal bars in panels."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results import Case, Result, baseline_of, by_case

COLORS = {"maxmoe": "#1b6ca8", "alternative": "#9aa5b1", "bound": "#b5541c"}

# Bars end here: the slowest contenders would flatten the rest.
LONGEST = 5.0


class Bar(NamedTuple):
    """A name, a length, and whose it is: a key of COLORS."""

    name: str
    value: float
    kind: str


class Panel(NamedTuple):
    """Bars in groups, each under its heading."""

    title: str
    label: str
    groups: dict[str, list[Bar]]


def time_panels(results: Iterable[Result]) -> list[Panel]:
    """Times, those of maxmoe being 1."""
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


def draw(path: Path, heading: str, panels: list[Panel]) -> None:
    """Draw the panels, at most two beside each other.

    Args:
        path: of the PNG.
        heading: above them.
        panels: at least one.
    """
    columns = min(len(panels), 2)
    rows = [panels[first : first + columns] for first in range(0, len(panels), columns)]
    lines = [max(_num_lines(panel) for panel in row) for row in rows]
    height = 0.6 + sum(0.8 + 0.24 * number for number in lines)
    figure = Figure(figsize=(7.5 * columns, height), layout="constrained")
    figure.suptitle(heading, fontsize=13)
    ratios = [3 + number for number in lines]
    grid = figure.subplots(len(rows), columns, squeeze=False, height_ratios=ratios)
    for row, panels_of_row, number in zip(grid, rows, lines, strict=True):
        for axes, panel in zip(row, panels_of_row, strict=False):
            _draw_panel(axes, panel, number)
        for axes in row[len(panels_of_row) :]:
            axes.remove()
    # A run on a full disk then fails on a plain file.
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    path.write_bytes(stream.getvalue())


def _num_lines(panel: Panel) -> float:
    return sum(len(bars) + 1.6 for bars in panel.groups.values())


def _draw_panel(axes: Axes, panel: Panel, num_lines: float) -> None:
    values = [bar.value for bars in panel.groups.values() for bar in bars]
    end = min(1.12 * max(*values, 1), LONGEST)
    on_white = {"va": "center", "bbox": {"color": "white", "pad": 0.5}}
    names, places, place = [], [], 0.0
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
    for heading, bars in panel.groups.items():
        axes.text(0.01 * end, place, heading, fontweight="bold", fontsize=9, **on_white)
        for bar in bars:
            place += 1
            axes.barh(place, min(bar.value, end), height=0.75, color=COLORS[bar.kind])
            text = f"{bar.value:.2f}" if bar.value <= end else f"{bar.value:.1f} (cut off)"
            if bar.value > 0.93 * end:
                axes.text(0.99 * end, place, text, fontsize=8, ha="right", va="center", color="white")
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
