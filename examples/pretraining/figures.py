"""The pictures of a run, as PNG."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING, HELD_OUT, OTHER, BASELINE = "#9aa5b1", "#1b6ca8", "#3d8b54", "#b5541c"


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
    from matplotlib.figure import Figure  # the import takes half a second, and most ranks draw nothing

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(training) + 1), training, color=TRAINING, linewidth=0.8, label="training batch")
    for (name, pairs), color in zip(held_out.items(), (HELD_OUT, OTHER), strict=False):
        label = f"{name}, {pairs[-1][1]:.2f} at the end".replace("$", r"\$")
        axes.plot(*zip(*pairs, strict=True), color=color, linewidth=2, marker="o", markersize=4, label=label)
    for name, value in baselines.items():
        axes.axhline(value, color=BASELINE, linewidth=1, linestyle="--")
        label, place = f" {name}\n {value:.2f}", ("axes fraction", "data")
        axes.annotate(label, (1, value), xycoords=place, va="center", color=BASELINE)
    # The first losses are 8 bits per byte and would compress the rest of the curve.
    axes.set_ylim(0, 1.4 * max(*baselines.values(), *(pairs[-1][1] for pairs in held_out.values())))
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def save(figure: "Figure", path: Path) -> None:
    """Write a PNG. It is drawn in memory, so that a full disk raises a plain OSError."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    path.write_bytes(stream.getvalue())
