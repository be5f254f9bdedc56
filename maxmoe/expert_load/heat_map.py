"""Heat map of the load of each expert over time, drawn by matplotlib."""

from collections.abc import Mapping

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor

NO_TOKEN = "gold"
LEAST = 1e-9  # lower than any load above zero


def heat_map(tokens_per_expert: Mapping[str, Tensor], window: int, num_steps: int) -> Figure:
    """Draw the load of each expert over time, divided by the mean over experts, one panel per layer.

    Args:
        tokens_per_expert: tokens of each expert ``(W, E)``, int64, in W windows of steps, by layer.
        window: steps per window; the last window may have fewer.
        num_steps: steps done.
    """
    num_layers = len(tokens_per_expert)
    columns = min(num_layers, 2)
    rows = -(-num_layers // columns)
    figure = Figure(figsize=(5 * columns, 0.9 + 2.4 * rows), layout="constrained")
    one_scale = len({counts.shape[1] for counts in tokens_per_expert.values()}) == 1
    panels = figure.subplots(rows, columns, sharex=True, sharey=one_scale, squeeze=False).ravel()
    for (layer, counts), axes in zip(tokens_per_expert.items(), panels, strict=False):
        image = _draw_panel(axes, counts.double(), window)
        axes.set_title(layer.replace("$", r"\$"), fontsize=10)
        axes.set_xlim(0, num_steps)
    for axes in panels[num_layers:]:
        axes.remove()
    for axes in panels[max(0, num_layers - columns) : num_layers]:  # panels without a panel below
        axes.tick_params(labelbottom=True)
    figure.supxlabel("step")
    figure.supylabel("expert")
    label = "tokens of the expert /\nmean over experts (yellow: none)"
    bar = figure.colorbar(image, ax=panels[:num_layers].tolist(), extend="both", label=label)
    bar.set_ticks([LEAST, 0.5, 1, 2, 3], labels=["0", "0.5", "1", "2", "3"])
    return figure


def _draw_panel(axes: Axes, counts: Tensor, window: int) -> AxesImage:
    """Draw the counts ``(W, E)`` of one layer, divided by their mean over the experts."""
    num_windows, num_experts = counts.shape
    return axes.imshow(
        (counts / counts.mean(1, keepdim=True)).T.numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap=matplotlib.colormaps["RdBu_r"].with_extremes(under=NO_TOKEN),
        norm=TwoSlopeNorm(vmin=LEAST, vcenter=1, vmax=3),
        extent=(0, num_windows * window, num_experts - 0.5, -0.5),
    )
