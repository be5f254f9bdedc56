"""The picture of a comparison, as PNG: loss, differences of the losses, speed and memory."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from finetuning.training import MIB, Run
from pretraining.figures import save

COLORS = {"eager": "#9aa5b1", "grouped_mm": "#b5541c", "maxmoe": "#1b6ca8"}


def comparison(path: Path, family: str, runs: list[Run]) -> None:
    """Draw the loss of the first run, the differences of the other losses from it, and the speed and memory of all.

    Args:
        path: path of the PNG.
        family: name of the family in the title.
        runs: one run per implementation, on the same batches.
    """
    first, *others = runs
    figure = Figure(figsize=(12, 6), layout="constrained")
    figure.suptitle(
        f"{family}, {first.num_trained:,} trained parameters, with the same parameters and batches for all "
        "implementations of the experts"
    )
    panels = figure.subplots(2, 2, width_ratios=(2, 1))
    (loss, speed), (difference, memory) = panels
    steps = range(1, len(first.losses) + 1)
    loss.plot(steps, first.losses, color=COLORS[first.implementation], linewidth=1)
    loss.set(xlabel="step", ylabel="nats per byte", title=f"loss with {first.implementation}")
    for run in others:
        apart = [abs(one - other) for one, other in zip(run.losses, first.losses, strict=True)]
        difference.plot(steps, apart, color=COLORS[run.implementation], linewidth=1, label=run.implementation)
    # A difference of 0 has no logarithm; it is drawn on the lower edge.
    difference.set_yscale("symlog", linthresh=1e-8)
    difference.set_ylim(bottom=0)
    difference.set(xlabel="step", ylabel="nats per byte", title=f"difference from the loss with {first.implementation}")
    difference.legend(frameon=False)
    bars(speed, "tokens per second", runs, [run.tokens_per_second for run in runs])
    bars(memory, "peak memory, MiB", runs, [run.peak / MIB for run in runs])
    for axes in panels.ravel():
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def bars(axes: Axes, title: str, runs: list[Run], values: list[float]) -> None:
    """Draw one bar per run, with its value."""
    drawn = axes.barh([run.implementation for run in runs], values, color=[COLORS[run.implementation] for run in runs])
    axes.bar_label(drawn, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(title=title, xticks=[])
    axes.spines["bottom"].set_visible(False)
