"""Pictures of a comparison, as PNG: differences from one process, speed, memory and bytes sent by each strategy."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dispatching.muon import MuonRun
from dispatching.sent_bytes import KINDS
from dispatching.training import MIB, Run
from pretraining.figures import save

INK, GREY, BLUE = "#333333", "#9aa5b1", "#1b6ca8"
LINES = [GREY, "#b5541c", BLUE, "#8fbce6"]  # one process, and three shardings
KIND_COLORS = dict(zip(KINDS, ["#1b6ca8", "#8fbce6", "#9aa5b1", "#b5541c"], strict=True))


def comparison(path: Path, runs: list[Run], options: Namespace) -> None:
    """Draw differences from one process, speed, memory and bytes sent.

    Args:
        path: path of the PNG.
        runs: results, the run of one process first.
        options: options of the command line.
    """
    figure = Figure(figsize=(13, 8), layout="constrained")
    routing = "random" if options.random_routing else "learned"
    figure.suptitle(
        f"One model by {len(runs) - 1} strategies on {options.ranks} ranks, {options.dtype}, {routing} routing"
    )
    panels = figure.subplots(2, 3)
    (loss, loss_apart, gradients_apart), (speed, memory, sent) = panels
    loss.plot(range(1, options.steps + 1), runs[0].losses, color=INK)
    loss.set(title="loss of one process, nats per byte", xlabel="step")
    dots(
        loss_apart,
        "loss: largest difference\nfrom one process",
        runs[1:],
        [max(run.loss_differences) for run in runs[1:]],
    )
    gradients = [max(run.gradient_differences) for run in runs[1:]]
    dots(gradients_apart, "gradients: largest difference,\nof the largest entry", runs[1:], gradients)
    gradients_apart.tick_params("y", length=0, labelleft=False)
    tokens = options.batch_size * options.sequence_length
    speeds, peaks = [run.tokens_per_second(tokens) for run in runs], [run.peak / MIB for run in runs]
    bars(speed, "tokens per second, all ranks", runs, speeds, [f"{value:,.0f}" for value in speeds])
    bars(memory, "peak memory of a rank, MiB", runs, peaks, [f"{value:.0f}" for value in peaks])
    memory.set_yticks([])
    draw_sent(sent, runs)
    for axes in panels.ravel():
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def muon_comparison(path: Path, runs: list[MuonRun], options: Namespace) -> None:
    """Draw losses, step time and bytes sent of Muon under several shardings.

    Args:
        path: path of the PNG.
        runs: results, the run of one process first.
        options: options of the command line.
    """
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(f"One model with Muon, sharded in {len(runs) - 1} ways on {options.ranks} ranks, {options.dtype}")
    losses, times, sent = figure.subplots(1, 3)
    for number, (run, color) in enumerate(zip(runs, LINES, strict=True)):
        style = {"color": color, "linewidth": 2 * (len(runs) - number), "alpha": 0.8}  # equal curves overlap
        losses.plot(range(1, options.steps + 1), run.losses, **style, label=run.strategy.name)
    losses.set(title="loss", xlabel="step", ylabel="nats per byte")
    losses.legend(frameon=False, fontsize=8)
    steps = [1e3 * run.step_time for run in runs]
    bars(times, "ms of a step, and Muon's part (hatched)", runs, steps, [f"{value:,.0f}" for value in steps])
    times.barh(range(len(runs)), [1e3 * run.muon_time for run in runs], color="none", edgecolor="white", hatch="///")
    sizes = [run.muon_sent / MIB for run in runs]
    labels = [f"{size:.2f} in {run.collectives} collectives" for run, size in zip(runs, sizes, strict=True)]
    bars(sent, "MiB sent by Muon on a rank in a step", runs, sizes, labels)
    sent.set(yticks=[], xlim=(0, 1.8 * max(sizes)))  # room for the labels
    for axes in (losses, times, sent):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def dots(axes: Axes, title: str, runs: Sequence[Run], values: list[float]) -> None:
    """Draw the difference of each run from one process, on a logarithmic scale with a place for 0."""
    least = min([value for value in values if value > 0], default=1e-16)
    axes.scatter(values, range(len(runs)), color=BLUE, zorder=2)
    for place, value in enumerate(values):
        axes.annotate(f"{value:.0e}" if value else "0", (value, place), (7, 0), textcoords="offset points", va="center")
    axes.set_xscale("symlog", linthresh=least / 10)
    axes.set(title=title, xlim=(0, 30 * max(*values, least)))
    axes.set_yticks(range(len(runs)), [run.strategy.name for run in runs])
    axes.tick_params("x", which="both", length=0, labelbottom=False)
    axes.grid(axis="y", color="#e4e7eb")
    axes.invert_yaxis()
    axes.spines["bottom"].set_visible(False)


def bars(axes: Axes, title: str, runs: Sequence[Run | MuonRun], values: list[float], labels: list[str]) -> None:
    """Draw one bar per run, with its label."""
    drawn = axes.barh(range(len(runs)), values, color=[GREY] + [BLUE] * (len(runs) - 1))
    axes.bar_label(drawn, labels, padding=3)
    axes.set_yticks(range(len(runs)), [run.strategy.name for run in runs])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set(title=title, xticks=[])
    axes.spines["bottom"].set_visible(False)


def draw_sent(axes: Axes, runs: list[Run]) -> None:
    """Draw the bytes that a rank sends per step, by kind of collective."""
    left = [0.0] * len(runs)
    for kind, color in KIND_COLORS.items():
        values = [run.sent[kind] / MIB for run in runs]
        drawn = axes.barh(range(len(runs)), values, left=left, color=color, label=kind)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.bar_label(drawn, [f"{total:.1f}" for total in left], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set(title="sent by a rank in a step, MiB", xticks=[], yticks=[])
    axes.legend(frameon=False, fontsize=8)
    axes.spines["bottom"].set_visible(False)
