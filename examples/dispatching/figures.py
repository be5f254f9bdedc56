"""The picture of a comparison, as PNG: differences from one process, speed, memory and bytes of every strategy."""

from argparse import Namespace
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dispatching.muon import MuonRun
from dispatching.sent_bytes import KINDS
from dispatching.training import MIB, Run
from pretraining.figures import save

COLORS = matplotlib.colormaps["tab10"].colors
KIND_COLORS = dict(zip(KINDS, ["#1b6ca8", "#8fbce6", "#9aa5b1", "#b5541c"], strict=True))


def comparison(path: Path, runs: list[Run], options: Namespace) -> None:
    """Draw all that was measured.

    Args:
        path: of the PNG.
        runs: one process first.
        options: the command line.
    """
    figure = Figure(figsize=(13, 8), layout="constrained")
    routing = "random" if options.random_routing else "learned"
    figure.suptitle(
        f"One model by {len(runs) - 1} strategies on {options.ranks} ranks, {options.dtype}, {routing} routing"
    )
    panels = figure.subplots(2, 3)
    (loss, loss_apart, gradients_apart), (speed, memory, sent) = panels
    steps = range(1, options.steps + 1)
    loss.plot(steps, runs[0].losses, color="#333333")
    loss.set(title="loss of one process", xlabel="step", ylabel="nats per byte")
    for run, color in zip(runs[1:], COLORS, strict=False):
        loss_apart.plot(
            steps, [*accumulate(run.loss_differences, max)], color=color, linewidth=1, label=run.strategy.name
        )
        gradients_apart.plot(steps, [*accumulate(run.gradient_differences, max)], color=color, linewidth=1)
    least = {"float64": 1e-16, "float32": 1e-8}[options.dtype]
    for axes, title in (
        (loss_apart, "loss: largest difference\nfrom one process so far"),
        (gradients_apart, "gradients: largest difference\nfrom one process so far"),
    ):
        axes.set_yscale("symlog", linthresh=least)  # equal ones, which a logarithm cannot show, lie on the lower edge
        axes.set_ylim(bottom=0)
        axes.set(title=title, xlabel="step")
    loss_apart.set(ylabel="nats per byte")
    gradients_apart.set(ylabel="of the largest entry of a gradient")
    figure.legend(*loss_apart.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
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
    """Draw what Muon costs, sharded in several ways.

    Args:
        path: of the PNG.
        runs: one process first.
        options: the command line.
    """
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(f"One model with Muon, sharded in {len(runs) - 1} ways on {options.ranks} ranks, {options.dtype}")
    losses, times, sent = figure.subplots(1, 3)
    for number, (run, color) in enumerate(zip(runs, ["#333333", *COLORS], strict=False)):
        style = {"color": color, "linewidth": 2 * (len(runs) - number), "alpha": 0.6}  # equal ones lie on each other
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


def bars(axes: Axes, title: str, runs: Sequence[Run | MuonRun], values: list[float], labels: list[str]) -> None:
    """Draw one for each run, with its label."""
    drawn = axes.barh(range(len(runs)), values, color=["#333333", *COLORS[: len(runs) - 1]])
    axes.bar_label(drawn, labels, padding=3)
    axes.set_yticks(range(len(runs)), [run.strategy.name for run in runs])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set(title=title, xticks=[])
    axes.spines["bottom"].set_visible(False)


def draw_sent(axes: Axes, runs: list[Run]) -> None:
    """Draw the bytes that a rank sends in a step, by collective."""
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
