"""Heat map of the load of each expert over time, drawn by matplotlib."""

from collections.abc import Mapping

import matplotlib
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from torch import Tensor

NO_TOKEN = "gold"
LEAST = 1e-9  # lower than any load above zero


def heat_map(
    tokens_per_expert: Mapping[str, Tensor], window: int, num_steps: int, required_factors: Mapping[str, float]
) -> Figure:
    """Draw counts ``(W, E)`` in W windows of steps, by layer, divided by their mean over experts; see `LoadHistory`.

    `required_factors` of buffers are in the titles of the layers that have one, the others are 0.
    """
    num_layers = len(tokens_per_expert)
    columns = min(num_layers, 2)
    rows = -(-num_layers // columns)
    figure = Figure(figsize=(5 * columns, 0.9 + 2.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for (layer, counts), axes in zip(tokens_per_expert.items(), panels, strict=False):
        num_windows, num_experts = counts.shape
        loads = counts.double()
        image = axes.imshow(
            (loads / loads.mean(1, keepdim=True)).T.numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap=matplotlib.colormaps["RdBu_r"].with_extremes(under=NO_TOKEN),
            norm=TwoSlopeNorm(vmin=LEAST, vcenter=1, vmax=3),
            extent=(0, num_windows * window, num_experts - 0.5, -0.5),
        )
        factor = required_factors[layer]
        required = f", buffer factor {factor:.2f} required" if factor else ""
        axes.set_title(layer.replace("$", r"\$") + required, fontsize=10)
        axes.set_xlim(0, num_steps)
        axes.locator_params(integer=True)
    for axes in panels[num_layers:]:
        axes.remove()
    figure.supxlabel("step")
    figure.supylabel("expert")
    label = "tokens of the expert /\nmean over experts (yellow: none)"
    bar = figure.colorbar(image, ax=panels[:num_layers].tolist(), extend="both", label=label)
    bar.set_ticks([LEAST, 0.5, 1, 2, 3], labels=["0", "0.5", "1", "2", "3"])
    return figure
