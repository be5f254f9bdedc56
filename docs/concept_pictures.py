"""The pictures of docs/concepts, from a routing of a few tokens.

python docs/concept_pictures.py   # writes docs/concepts/*.png
"""

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle
from torch import Tensor

from maxmoe.ops import RaggedPlan, ragged_plan, route

FOLDER = Path(__file__).parent / "concepts"
TOKENS, EXPERTS, TOP_K = 6, 4, 2
COLORS = ["#8fbce6", "#f4b183", "#a9d18e", "#d9a7e0", "#ffe08a", "#9fd8d6"]  # of the tokens
INK, GREY = "#333333", "#8a8a8a"


def routing() -> tuple[Tensor, Tensor, Tensor]:
    """Weights and experts ``(T, K)`` and probabilities ``(T, E)`` of a few tokens."""
    logits = 1.5 * torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3))
    return route(logits, TOP_K)


def plan() -> RaggedPlan:
    """The rows of these tokens, sorted by expert."""
    return ragged_plan(routing()[1], EXPERTS)


def routing_picture() -> Figure:
    """Draw the scores with the chosen experts framed, and the tokens of every expert."""
    weights, experts, probabilities = routing()
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    table, bars = figure.subplots(1, 2, width_ratios=(1.3, 1))
    table.imshow(probabilities.numpy(), cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
    for token in range(TOKENS):
        for expert in range(EXPERTS):
            chosen = (experts[token] == expert).nonzero().flatten().tolist()
            text = f"{probabilities[token, expert]:.2f}"
            if chosen:
                text += f"\nweight {weights[token, chosen[0]]:.2f}"
                frame = (expert - 0.46, token - 0.44), 0.92, 0.88
                table.add_patch(Rectangle(*frame, fill=False, edgecolor="#b5541c", linewidth=2))
            table.text(expert, token, text, ha="center", va="center", fontsize=10, color=INK)
    table.set_xticks(range(EXPERTS), [f"expert {expert}" for expert in range(EXPERTS)])
    table.set_yticks(range(TOKENS), [f"token {token}" for token in range(TOKENS)])
    table.tick_params(length=0)
    table.set_title("scores; framed: the two best of each token", loc="left", fontsize=11)
    counts = plan().group_sizes.tolist()
    bars.barh(range(EXPERTS), counts, color="#8fbce6", height=0.6)
    for expert, count in enumerate(counts):
        bars.text(count + 0.06, expert, str(count), va="center", fontsize=10, color=INK)
    mean = TOKENS * TOP_K / EXPERTS
    bars.axvline(mean, color="#b5541c", linestyle="--", linewidth=1.2)
    bars.text(mean + 0.06, -0.52, f"mean {mean:g}", color="#b5541c", fontsize=10, va="center")
    bars.set_yticks(range(EXPERTS), [f"expert {expert}" for expert in range(EXPERTS)])
    bars.set(xlim=(0, max(counts) + 0.7), ylim=(EXPERTS - 0.5, -0.75), xticks=[])
    bars.tick_params(length=0)
    for axes in (table, bars):
        axes.spines[:].set_visible(False)
    bars.set_title("load: tokens of each expert", loc="left", fontsize=11)
    return figure


def ragged_picture() -> Figure:
    """Draw tokens, their rows in the order of the experts, and the sums."""
    found, experts = plan(), routing()[1].tolist()
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots()
    width = TOKENS * TOP_K
    left = [2 * token + 0.5 for token in range(TOKENS)]
    for token in range(TOKENS):
        draw_box(axes, left[token], 0, token, f"e{experts[token][0]}, e{experts[token][1]}")
        draw_box(axes, left[token], 5.2, token, "Σ")
    for row, slot in enumerate(found.slots.tolist()):
        token = slot // TOP_K
        draw_box(axes, row, 2.6, token, "")
        for begin, end in (
            ((left[token] + 0.47, 0.8), (row + 0.47, 2.6)),
            ((row + 0.47, 3.4), (left[token] + 0.47, 5.2)),
        ):
            axes.add_patch(ConnectionPatch(begin, end, "data", color=COLORS[token], linewidth=1.6, zorder=0))
    begin = 0
    for expert, size in enumerate(found.group_sizes.tolist()):
        axes.plot([begin, begin + size - 0.06], [2.45, 2.45], color=INK, linewidth=2.5, solid_capstyle="butt")
        axes.text(begin, 2.32, f"expert {expert}: {size} rows", fontsize=10, va="bottom", color=INK, bbox=BEHIND)
        begin += size
    for y, text in (
        (0.4, "tokens [T, D]\nand their experts"),
        (3.0, "rows [R, D],\nsorted by expert"),
        (5.6, "output [T, D]"),
    ):
        axes.text(-0.4, y, text, ha="right", va="center", fontsize=11, color=INK)
    for y, text in ((1.55, "ragged_sort"), (4.35, "ragged_unsort")):
        axes.text(width + 0.3, y, text, ha="left", va="center", fontsize=11, family="monospace", color=INK)
    axes.text(width + 0.3, 3.0, "gmm", ha="left", va="center", fontsize=11, family="monospace", color=INK)
    axes.set(xlim=(-3.4, width + 3), ylim=(6.2, -0.2))
    axes.set_axis_off()
    return figure


BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def draw_box(axes: Axes, left: float, top: float, token: int, label: str) -> None:
    """Draw a row of numbers in the color of its token."""
    axes.add_patch(Rectangle((left, top), 0.94, 0.8, facecolor=COLORS[token], edgecolor="white"))
    text = f"{token}\n{label}" if label else str(token)
    axes.text(left + 0.47, top + 0.4, text, ha="center", va="center", fontsize=9, color=INK)


PICTURES = {"routing": routing_picture, "ragged_operators": ragged_picture}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        picture().savefig(FOLDER / f"{name}.png", dpi=100, metadata={"Software": None})
