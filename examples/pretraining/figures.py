"""The two pictures of a run, as PNG: loss curves, and the load of each expert over time."""

import io
from pathlib import Path

import matplotlib
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from torch import Tensor

TRAINING, HELD_OUT, OTHER, BASELINE = "#9aa5b1", "#1b6ca8", "#3d8b54", "#b5541c"
NO_TOKEN = "gold"
LEAST = 1e-9  # lower than any load above zero


def loss_curves(
    path: Path,
    training: list[float],
    held_out: dict[str, list[tuple[int, float]]],
    baselines: dict[str, float],
) -> None:
    """Draw bits per byte over the steps.

    Args:
        path: path of the PNG.
        training: training loss of each step.
        held_out: curves on the held-out text by label, each a list of pairs of step and value.
        baselines: values of horizontal lines by label.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(training) + 1), training, color=TRAINING, linewidth=0.8, label="training batch")
    for (name, pairs), color in zip(held_out.items(), (HELD_OUT, OTHER), strict=False):
        label = f"{name}, {pairs[-1][1]:.2f} at the end".replace("$", r"\$")
        axes.plot(*zip(*pairs, strict=True), color=color, linewidth=2, marker="o", markersize=4, label=label)
    for name, value in baselines.items():
        axes.axhline(value, color=BASELINE, linewidth=1, linestyle="--")
        place = {"xycoords": ("axes fraction", "data"), "va": "center", "color": BASELINE}
        axes.annotate(f" {name}\n {value:.2f}", (1, value), **place)
    # The first losses are 8 bits per byte and would compress the rest of the curve.
    axes.set_ylim(0, 1.4 * max(*baselines.values(), *(pairs[-1][1] for pairs in held_out.values())))
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def expert_load(path: Path, tokens_per_expert: Tensor, window: int, steps: int) -> None:
    """Draw the load of each expert over time, divided by the mean over experts, one panel per layer.

    Windows in which an expert gets no token have a separate color.

    Args:
        path: path of the PNG.
        tokens_per_expert: ``(W, M, E)`` int64, tokens of each expert in W windows of steps.
        window: steps per window; the last window may have fewer.
        steps: steps done.
    """
    counts = tokens_per_expert.double()
    load = (counts / counts.mean(-1, keepdim=True)).permute(1, 2, 0)  # [M, E, W]
    num_layers, num_experts, num_windows = load.shape
    columns = min(num_layers, 2)
    rows = -(-num_layers // columns)
    figure = Figure(figsize=(5 * columns, 0.9 + 2.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    norm = TwoSlopeNorm(vmin=LEAST, vcenter=1, vmax=3)
    colors = matplotlib.colormaps["RdBu_r"].with_extremes(under=NO_TOKEN)
    for layer, axes in enumerate(panels[:num_layers]):
        extent = (0, num_windows * window, num_experts - 0.5, -0.5)
        image = axes.imshow(
            load[layer].numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap=colors,
            norm=norm,
            extent=extent,
        )
        axes.set_title(f"MoE layer {layer}", fontsize=10)
        axes.set_xlim(0, steps)
    for axes in panels[num_layers:]:
        axes.remove()
    for axes in panels[max(0, num_layers - columns) : num_layers]:  # panels without a panel below
        axes.tick_params(labelbottom=True)
    figure.supxlabel("step")
    figure.supylabel("expert")
    label = "tokens of the expert /\nmean over experts (yellow: none)"
    bar = figure.colorbar(image, ax=panels[:num_layers].tolist(), extend="both", label=label)
    bar.set_ticks([LEAST, 0.5, 1, 2, 3], labels=["0", "0.5", "1", "2", "3"])
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG. It is drawn in memory, so that a full disk raises a plain OSError."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    path.write_bytes(stream.getvalue())
