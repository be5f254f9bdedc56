"""The picture of README.md: what a layer does with six tokens, from its own router and plan.

python docs/overview_picture.py   # writes docs/overview.png
"""

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch, Rectangle
from matplotlib.path import Path as Curve

from maxmoe.ops import ragged_plan, route

TOKENS, EXPERTS, TOP_K = 6, 4, 2
COLORS = ["#1b6ca8", "#b5541c", "#5b8c3a", "#8a5aa8"]  # of the experts
GREY, INK = "#d4d7dc", "#333333"
HEIGHT = TOKENS * TOP_K  # of the picture, in rows
X_TOKENS, X_SCORES, X_ROWS, X_EXPERTS, X_RESULTS, X_SUMS = 0.0, 2.6, 10.2, 12.6, 18.6, 23.4


def box(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    """Draw one row of numbers, a token's or an expert's result."""
    axes.add_patch(Rectangle((x, y - 0.42), 1.3, 0.84, facecolor=color, edgecolor="white"))
    axes.text(x + 0.65, y, text, ha="center", va="center", fontsize=9, color="white" if color in COLORS else INK)


def arc(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, width: float) -> None:
    """Draw the way of one row."""
    middle = (start[0] + end[0]) / 2
    points = [start, (middle, start[1]), (middle, end[1]), end]
    codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
    axes.add_patch(PathPatch(Curve(points, codes), facecolor="none", edgecolor=color, linewidth=width, alpha=0.75))


def scores_panel(axes: Axes, scores: torch.Tensor, experts: torch.Tensor, heights: np.ndarray) -> None:
    """Draw the score of every token for every expert; the chosen ones have the expert's color."""
    for token in range(TOKENS):
        for expert in range(EXPERTS):
            chosen, score = expert in experts[token].tolist(), float(scores[token, expert])
            place = (X_SCORES + 1.25 * expert, heights[token] - 0.6)
            axes.add_patch(
                Rectangle(place, 1.17, 1.2, facecolor=COLORS[expert] if chosen else "#eef0f3", edgecolor="white")
            )
            color = "white" if chosen else "#888888"
            axes.text(
                place[0] + 0.585, heights[token], f"{score:.2f}", ha="center", va="center", fontsize=8, color=color
            )


def picture() -> Figure:
    """Draw tokens, scores, sorted rows, experts, their results and the weighted sums from left to right."""
    logits = 1.6 * torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(215))
    weights, experts, scores = route(logits, TOP_K)
    plan = ragged_plan(experts, EXPERTS)
    sizes, slots = plan.group_sizes.tolist(), plan.slots.tolist()
    token_heights = HEIGHT - 1 - (np.arange(TOKENS) + 0.5) * TOP_K + 0.5
    row_heights = HEIGHT - 1 - np.arange(len(slots)).astype(float)
    figure = Figure(figsize=(13, 5.1), layout="constrained")
    axes = figure.subplots()
    scores_panel(axes, scores, experts, token_heights)
    for token, height in enumerate(token_heights):
        box(axes, X_TOKENS, height, f"token {token}", GREY)
        box(axes, X_SUMS, height, f"token {token}", GREY)
    owners = [expert for expert, size in enumerate(sizes) for _ in range(size)]
    for slot, expert, y in zip(slots, owners, row_heights, strict=True):
        token, choice = divmod(slot, TOP_K)
        arc(axes, (X_SCORES + 1.25 * EXPERTS, token_heights[token]), (X_ROWS, y), COLORS[expert], 1.5)
        box(axes, X_ROWS, y, f"token {token}", GREY)
        box(axes, X_RESULTS, y, f"token {token}", COLORS[expert])
        weight = float(weights[token, choice])
        arc(axes, (X_RESULTS + 1.3, y), (X_SUMS, token_heights[token]), COLORS[expert], 4 * weight)
    first = 0
    for expert, size in enumerate(sizes):
        top, bottom = row_heights[first] + 0.42, row_heights[first + size - 1] - 0.42
        shape = FancyBboxPatch(
            (X_EXPERTS, bottom), 4.9, top - bottom, boxstyle="round,pad=0,rounding_size=0.2", color=COLORS[expert]
        )
        axes.add_patch(shape)
        text = f"expert {expert}: {size} row{'s' * (size > 1)}"
        axes.text(X_EXPERTS + 2.45, (top + bottom) / 2, text, ha="center", va="center", fontsize=10, color="white")
        first += size
    headings = {
        X_TOKENS + 0.65: "hidden\nstates",
        X_SCORES + 2.5: f"router: a score for each\nexpert, {TOP_K} chosen",
        X_ROWS + 0.65: "rows sorted\nby expert",
        X_EXPERTS + 2.45: "experts: grouped matrix\nproducts of any sizes",
        X_RESULTS + 0.65: "results",
        X_SUMS + 0.65: "weighted\nsums",
    }
    for x, text in headings.items():
        axes.text(x, HEIGHT + 0.1, text, ha="center", va="bottom", fontsize=11, color=INK)
    axes.set(xlim=(-0.2, X_SUMS + 1.5), ylim=(-0.6, HEIGHT + 1.6))
    axes.set_axis_off()
    return figure


if __name__ == "__main__":
    picture().savefig(Path(__file__).with_name("overview.png"), dpi=130)
