"""Colors and small pictures of the notebooks: labeled curves, heat maps, rows of tokens."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.patches import ConnectionPatch, Rectangle
from torch import Tensor

BLUE, ACCENT, GREY, INK = "#1b6ca8", "#b5541c", "#9aa5b1", "#333333"
LINES = [BLUE, ACCENT, "#5b8c3a", "#8a5aa8"]  # colors of curves
TOKENS = ["#8fbce6", "#f4b183", "#a9d18e", "#d9a7e0", "#ffe08a", "#9fd8d6"]  # colors of tokens and of ranks
NOBODY = "#e4e7eb"

plt.rcParams.update(
    {
        "figure.constrained_layout.use": True,
        "figure.dpi": 90,
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "text.color": INK,
    }
)


def curves(axes: Axes, values: Mapping[str, Sequence[float]], form: str = "{:.2f}", **settings: object) -> None:
    """Draw curves over the steps, each labeled with its name and last value. `settings` are passed to the axes."""
    for curve, color in zip(values.values(), LINES, strict=False):
        axes.plot(range(1, len(curve) + 1), curve, color=color, linewidth=1.8)
    axes.set(**{"xlabel": "step"} | settings)
    heights = axes.transAxes.inverted().transform(
        axes.transData.transform([(0, curve[-1]) for curve in values.values()])
    )
    ends = sorted(zip(heights[:, 1], values.items(), LINES, strict=False), key=lambda end: end[0])
    lowest = -1.0
    for height, (name, curve), color in ends:
        lowest = max(height, lowest + 0.1)  # labels must not overlap
        text = f" {name} {form.format(curve[-1])}"
        axes.annotate(text, (1, lowest), xycoords="axes fraction", va="center", color=color, annotation_clip=False)


def load_map(axes: Axes, tokens_per_expert: Tensor) -> None:
    """Draw the load ``(steps, E)`` of each expert, divided by the mean: blue below 1, red above."""
    load = tokens_per_expert.double()
    load = load / load.mean(-1, keepdim=True)
    norm = TwoSlopeNorm(vmin=0, vcenter=1, vmax=3)
    image = axes.imshow(load.T, aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=norm)
    axes.set(xlabel="step", ylabel="expert", yticks=range(0, load.shape[1], 4))
    axes.figure.colorbar(image, ax=axes, label="load / mean", ticks=[0, 1, 2, 3], extend="max", shrink=0.9)


def table(axes: Axes, values: Tensor, title: str, form: str = "{:.2f}") -> None:
    """Draw a matrix ``(T, E)`` as a blue table; cells with zero stay empty."""
    axes.imshow(values.detach(), cmap="Blues", vmin=0, vmax=1.8 * float(values.max()), aspect="auto")
    for token, row in enumerate(values.tolist()):
        for expert, value in enumerate(row):
            if value:
                axes.text(expert, token, form.format(value), ha="center", va="center", fontsize=8, color=INK)
    axes.set(title=title, xlabel="expert", xticks=range(values.shape[1]), yticks=range(values.shape[0]))
    axes.tick_params(length=0)


def boxes(axes: Axes, top: float, texts: Sequence[str], colors: Sequence[str]) -> None:
    """Draw a row of boxes of width 1, starting at the left."""
    for place, (text, color) in enumerate(zip(texts, colors, strict=True)):
        axes.add_patch(Rectangle((place, top), 0.94, 0.7, facecolor=color, edgecolor="white"))
        axes.text(place + 0.47, top + 0.35, text, ha="center", va="center", fontsize=9)


def lines(axes: Axes, pairs: Sequence[tuple[int, int]], top: float, bottom: float, colors: Sequence[str]) -> None:
    """Draw lines between boxes of the rows `top` and `bottom`."""
    for (start, end), color in zip(pairs, colors, strict=True):
        ends = (start + 0.47, top), (end + 0.47, bottom)
        axes.add_patch(ConnectionPatch(*ends, "data", "data", color=color, linewidth=1.6, zorder=0))


def frame(axes: Axes, width: float, height: float) -> None:
    """Set the limits to `width` boxes and `height` rows and hide the axes."""
    axes.set(xlim=(-0.1, width), ylim=(height, -0.5))
    axes.set_axis_off()
