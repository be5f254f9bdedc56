"""The picture of a comparison of ways to balance the load, as PNG."""

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from load_balancing.training import Run
from pretraining.figures import save

COLORS = ["#9aa5b1", "#b5541c", "#e0a458", "#8fbce6", "#1b6ca8"]


def comparison(path: Path, runs: list[Run]) -> None:
    """Draw load and bits per byte over the steps, a line per run, and the specialisation, a dot per run."""
    ways = list(dict.fromkeys(run.way for run in runs))
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    load, held_out, specialisation = figure.subplots(1, 3)
    for run in runs:
        style = {"color": COLORS[ways.index(run.way)], "linewidth": 1.2}
        load.plot(*smoothed(run.load), **style)
        held_out.plot(*zip(*run.held_out, strict=True), marker="o", markersize=3, **style)
        specialisation.plot(ways.index(run.way), run.specialisation, "o", color=style["color"])
    load.set(title="busiest expert / mean", xlabel="step", ylim=(1, None))
    held_out.set(title="bits per byte, held-out text", xlabel="step")
    specialisation.set(title="bits that the expert tells of the byte", xticks=range(len(ways)), ylim=(0, None))
    specialisation.set_xticklabels([way.replace(" ", "\n") for way in ways])
    specialisation.set_xlim(-0.5, len(ways) - 0.5)
    legend(load, ways)
    for axes in (load, held_out, specialisation):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def smoothed(values: list[float]) -> tuple[list[float], list[float]]:
    """Return the means over at most 100 parts of the steps, and the last step of each part."""
    length = -(-len(values) // 100)
    parts = torch.tensor(values).split(length)
    steps = torch.tensor([len(part) for part in parts]).cumsum(0)
    return steps.tolist(), [float(part.mean()) for part in parts]


def legend(axes: Axes, ways: list[str]) -> None:
    """Name the colors of the ways."""
    for way, color in zip(ways, COLORS, strict=False):
        axes.plot([], [], color=color, label=way)
    axes.legend(frameon=False)
