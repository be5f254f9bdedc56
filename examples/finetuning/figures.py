"""The picture of a comparison, as PNG: the losses, the speed and the memory."""

from pathlib import Path

from matplotlib.figure import Figure

from finetuning.training import MIB, Run
from pretraining.figures import save

COLORS = {"eager": "#9aa5b1", "grouped_mm": "#b5541c", "maxmoe": "#1b6ca8"}
# Equal losses lie on each other: thick lines below thin ones show all of them.
WIDTHS = {"eager": 5.0, "grouped_mm": 2.5, "maxmoe": 1.0}


def comparison(path: Path, family: str, runs: list[Run]) -> None:
    """Draw the runs beside each other.

    Args:
        path: of the PNG.
        family: for the title.
        runs: one for each implementation.
    """
    figure = Figure(figsize=(12, 4), layout="constrained")
    losses, speed, memory = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    names = [run.implementation for run in runs]
    colors = [COLORS[name] for name in names]
    for run in runs:
        name = run.implementation
        steps = range(1, len(run.losses) + 1)
        losses.plot(steps, run.losses, color=COLORS[name], linewidth=WIDTHS[name], label=name)
    losses.set(xlabel="step", ylabel="loss, nats per byte", title=family)
    losses.legend(frameon=False)
    bars = speed.bar(names, [run.tokens_per_second for run in runs], color=colors)
    speed.bar_label(bars, fmt="{:,.0f}")
    speed.set_title("tokens per second")
    bars = memory.bar(names, [run.peak / MIB for run in runs], color=colors)
    memory.bar_label(bars, fmt="{:,.0f}")
    memory.set_title("peak memory, MiB")
    for axes in (losses, speed, memory):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
