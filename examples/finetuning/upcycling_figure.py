"""The picture of an upcycled model, as PNG: the loss of the dense model and of the MoE model beside it."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure

from finetuning.upcycling import ModelRun
from pretraining.figures import save

COLORS = {"dense": "#b5541c", "MoE": "#1b6ca8"}
BEFORE = "#9aa5b1"
WINDOW = 20  # steps over which the curves are averaged


def draw(path: Path, before: ModelRun, runs: Sequence[ModelRun]) -> None:
    """Draw the loss of the dense model before, and of both models afterwards.

    Args:
        path: path of the PNG.
        before: training of the dense model before it was upcycled, which may have no steps.
        runs: training of both models on the same batches; empty if it has not begun.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    curves = [(before, BEFORE, "dense model, before"), *((run, COLORS[run.name], f"{run.name} model") for run in runs)]
    shown = [(run, color, label) for run, color, label in curves if run.losses]
    for run, color, label in shown:
        steps = range(run.first_step + 1, run.first_step + len(run.losses) + 1)
        averages = moving_average(run.losses, WINDOW)
        axes.plot(steps, run.losses, color=color, linewidth=0.5, alpha=0.35)
        axes.plot(steps, averages, color=color, linewidth=2, label=f"{label}, {averages[-1]:.3f} at the end")
    if runs and before.losses:
        begin = runs[0].first_step + 0.5
        axes.axvline(begin, color="black", linewidth=0.8, linestyle=":")
        axes.annotate("upcycled ", (begin, 0.02), xycoords=("data", "axes fraction"), ha="right")
    # The first losses come from random weights and would compress the rest of the curves.
    ends = [moving_average(run.losses, WINDOW)[-1] for run, _, _ in shown]
    if ends:
        axes.set_ylim(0.8 * min(ends), 1.6 * max(ends))
        axes.legend(frameon=False, loc="upper right")
    axes.set(xlabel="step", ylabel="nats per token", title=f"Training loss, mean over {WINDOW} steps")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over the last `window` values up to each value, over fewer at the start."""
    sums = [0.0, *accumulate(values)]
    starts = [max(0, end - window) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, 1)]
