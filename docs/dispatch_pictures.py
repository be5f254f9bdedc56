"""The pictures of docs/dispatch.md, from a routing of a few tokens, and its table of bytes.

python docs/dispatch_pictures.py   # prints the table, writes docs/dispatch_*.png
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from maxmoe.families.family import published_models
from maxmoe.ops import ragged_plan
from maxmoe.parallel.dispatch.computed_rows import ComputedRows
from maxmoe.parallel.dispatch.expert_moves import plan_moves

FOLDER = Path(__file__).parent
NUM_RANKS, TOKENS, TOP_K, EXPERTS = 4, 3, 2, 8  # tokens and experts: of a rank, and of all
COLORS = ["#8fbce6", "#f4b183", "#a9d18e", "#d9a7e0"]  # of the tokens of each rank
EVERYWHERE = "#d0d0d0"  # of tokens that all ranks have from the start
ALL_RANKS = range(NUM_RANKS)

GIB = 2**30
LAYERS = {published_models()[name].name: published_models()[name].layer() for name in ("mixtral", "deepseek_v3")}


@dataclass(frozen=True)
class Box:
    """A row of numbers on a rank: a token, or the sum over a token's experts.

    Args:
        token: number of it in the batch; its color is that of its rank.
        label: under the number.
        is_partial: whether it is a summand, which the picture hatches.
        is_foreign: whether an expert of another rank computes it, which the picture frames.
    """

    token: int
    label: str = ""
    is_partial: bool = False
    is_foreign: bool = False


Stage = tuple[str, list[list[Box]]]  # what happens before, and the boxes of every rank


def routing() -> torch.Tensor:
    """The experts ``(T, K)`` of the tokens of all ranks."""
    scores = torch.rand(NUM_RANKS * TOKENS, EXPERTS, generator=torch.Generator().manual_seed(4))
    return scores.topk(TOP_K).indices


def uneven_routing() -> torch.Tensor:
    """The same, if most tokens choose the second expert."""
    scores = torch.rand(NUM_RANKS * TOKENS, EXPERTS, generator=torch.Generator().manual_seed(4))
    scores[:, 1] += 0.7
    return scores.topk(TOP_K).indices


def own(rank: int) -> range:
    """The tokens of a rank."""
    return range(rank * TOKENS, (rank + 1) * TOKENS)


def rows_at(rank: int, tokens: Sequence[int]) -> list[Box]:
    """The rows of some tokens that the experts of a rank compute, in the order of the experts."""
    num_local = EXPERTS // NUM_RANKS
    plan = ragged_plan(routing()[list(tokens)], EXPERTS, first_expert=rank * num_local, num_local_experts=num_local)
    experts = (torch.arange(num_local) + rank * num_local).repeat_interleave(plan.group_sizes)
    return [
        Box(tokens[slot // TOP_K], f"e{expert}")
        for slot, expert in zip(plan.slots.tolist(), experts.tolist(), strict=True)
    ]


def all_to_all_rows(rank: int, routing: torch.Tensor) -> list[Box]:
    """The rows of a rank's own tokens, in the order of their experts: so they are sent."""
    plan = ragged_plan(routing[list(own(rank))], EXPERTS)
    experts = torch.arange(EXPERTS).repeat_interleave(plan.group_sizes).tolist()
    return [
        Box(own(rank)[slot // TOP_K], f"e{expert}") for slot, expert in zip(plan.slots.tolist(), experts, strict=True)
    ]


def sums(tokens: Sequence[int], *, is_partial: bool = False) -> list[Box]:
    """A row of the output for each token."""
    return [Box(token, "Σ", is_partial) for token in tokens]


def ring_of_experts() -> list[Stage]:
    """Every rank gets all tokens."""
    everything = range(NUM_RANKS * TOKENS)
    return [
        ("the tokens of each rank", [[Box(token) for token in own(rank)] for rank in ALL_RANKS]),
        ("all-gather: every rank has all tokens", [[Box(token) for token in everything] for _ in ALL_RANKS]),
        ("sort, and compute the rows of the rank's own experts", [rows_at(rank, everything) for rank in ALL_RANKS]),
        (
            "weighted sum over the experts of this rank: a summand of the output of every token",
            [sums(everything, is_partial=True) for _ in ALL_RANKS],
        ),
        ("reduce-scatter: every rank has the sum for its own tokens", [sums(own(rank)) for rank in ALL_RANKS]),
    ]


def ragged_all_to_all() -> list[Stage]:
    """Every rank gets the rows of its experts."""
    everything = range(NUM_RANKS * TOKENS)
    return [
        ("the tokens of each rank", [[Box(token) for token in own(rank)] for rank in ALL_RANKS]),
        (
            "one row for each token and expert, sorted by the expert",
            [all_to_all_rows(rank, routing()) for rank in ALL_RANKS],
        ),
        (
            "all-to-all: the rows go to the rank of their expert, which sorts and computes them",
            [rows_at(rank, everything) for rank in ALL_RANKS],
        ),
        (
            "all-to-all: the weighted outputs of the experts go back",
            [[Box(box.token, box.label) for box in all_to_all_rows(rank, routing())] for rank in ALL_RANKS],
        ),
        ("the sum over each token's experts", [sums(own(rank)) for rank in ALL_RANKS]),
    ]


def least_loaded() -> list[Stage]:
    """Ranks with few rows compute rows of the expert that most tokens chose."""
    sending = [all_to_all_rows(rank, uneven_routing()) for rank in ALL_RANKS]
    counts = torch.tensor([[sum(box.label == f"e{e}" for box in boxes) for e in range(EXPERTS)] for boxes in sending])
    computed = ComputedRows.of(counts, plan_moves(counts.sum(0).tolist(), NUM_RANKS, rows_per_expert=0))
    arriving: list[list[Box]] = [[] for _ in ALL_RANKS]
    for rank, boxes in enumerate(sending):
        sent = iter([boxes[place] for place in computed.order(rank)])
        for receiver, count in enumerate(computed.sent(rank)):
            arriving[receiver] += itertools.islice(sent, count)
    computing = []
    for rank, boxes in enumerate(arriving):
        foreign = [f"e{expert}" for expert in computed.foreign(rank)]
        marked = [Box(box.token, box.label, is_foreign=box.label in foreign) for box in boxes]
        computing.append(sorted(marked, key=lambda box: (box.is_foreign, box.label)))
    return [
        ("the tokens of each rank", [[Box(token) for token in own(rank)] for rank in ALL_RANKS]),
        ("one row for each token and expert, sorted by the expert; most have expert 1", sending),
        (
            "all-to-all: the rows go to the ranks that compute them; rank 0 sends the weights for framed rows",
            computing,
        ),
        ("all-to-all: the weighted outputs of the experts go back", sending),
        ("the sum over each token's experts", [sums(own(rank)) for rank in ALL_RANKS]),
    ]


def ep_tp() -> list[Stage]:
    """Every rank has the same tokens."""
    tokens = range(NUM_RANKS)  # few
    return [
        ("every rank has the same tokens", [[Box(token) for token in tokens] for _ in ALL_RANKS]),
        ("sort, and compute the rows of the rank's own experts", [rows_at(rank, tokens) for rank in ALL_RANKS]),
        (
            "weighted sum over the experts of this rank, and this rank's part of the shared experts: a summand",
            [sums(tokens, is_partial=True) for _ in ALL_RANKS],
        ),
        ("all-reduce: every rank has the sum for all tokens", [sums(tokens) for _ in ALL_RANKS]),
    ]


def gather_weights() -> list[Stage]:
    """The tokens stay."""
    weights = "all-gather of the weights of all experts; sort, and compute all rows of the rank's own tokens"
    return [
        ("the tokens of each rank", [[Box(token) for token in own(rank)] for rank in ALL_RANKS]),
        (weights, [all_to_all_rows(rank, routing()) for rank in ALL_RANKS]),
        ("the sum over each token's experts", [sums(own(rank)) for rank in ALL_RANKS]),
    ]


STRATEGIES = {
    "ring_of_experts": ring_of_experts,
    "ragged_all_to_all": ragged_all_to_all,
    "least_loaded": least_loaded,
    "ep_tp": ep_tp,
    "gather_weights": gather_weights,
}


def picture(name: str) -> Figure:
    """Draw the stages of a strategy from top to bottom, with a column for each rank."""
    stages = STRATEGIES[name]()
    figure = Figure(figsize=(13, 0.55 + 0.98 * len(stages)), layout="constrained")
    axes = figure.subplots()
    for index, (text, ranks) in enumerate(stages):
        top = 1.5 * index
        over_frames = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        axes.text(0, top - 0.2, f"{index + 1}. {text}", fontsize=12, va="bottom", bbox=over_frames, zorder=3)
        for rank, boxes in enumerate(ranks):
            draw_boxes(axes, 13 * rank, top, boxes, [EVERYWHERE] * NUM_RANKS if name == "ep_tp" else COLORS)
    bottom = 1.5 * len(stages) - 0.5
    num_local = EXPERTS // NUM_RANKS
    for rank in ALL_RANKS:
        axes.add_patch(
            FancyBboxPatch(
                (13 * rank - 0.2, -1.05), 12.4, bottom + 1.05, boxstyle="round,pad=0.1", fill=False, ec="#bbb"
            )
        )
        here = "all experts" if name == "gather_weights" else f"experts {rank * num_local} and {rank * num_local + 1}"
        axes.text(13 * rank + 6, -0.95, f"rank {rank}: {here}", ha="center", va="top", fontsize=12, fontweight="bold")
    axes.set(xlim=(-0.6, 13 * NUM_RANKS - 0.2), ylim=(bottom + 0.2, -1.25))
    axes.set_axis_off()
    return figure


def draw_boxes(axes: Axes, left: float, top: float, boxes: Sequence[Box], colors: Sequence[str]) -> None:
    """Draw boxes next to each other."""
    for place, box in enumerate(boxes):
        hatch = "////" if box.is_partial else None
        color = colors[box.token // TOKENS]
        edge = {"edgecolor": "black", "linewidth": 1.5} if box.is_foreign else {"edgecolor": "white"}
        axes.add_patch(Rectangle((left + place, top), 0.94, 0.75, facecolor=color, hatch=hatch, **edge))
        text = f"{box.token}\n{box.label}" if box.label else str(box.token)
        axes.text(left + place + 0.47, top + 0.375, text, ha="center", va="center", fontsize=8.5)


def bytes_table(tokens: int = 4096, num_ranks: int = 8, itemsize: int = 2) -> str:
    """What a rank sends in the forward of published layers, as a table in Markdown."""
    others = num_ranks - 1
    formulas = {
        "ring_of_experts": "`2 (P - 1) T D`",
        "ragged_all_to_all": "`2 K (P - 1) T D / P`",
        "ep-tp": "`2 (P - 1) T' D / P`",
        "gather_weights": "`3 (P - 1) E D F / P`",
    }
    lines = [f"| strategy | numbers sent, forward | {' | '.join(LAYERS)} |", "|---|---|" + "---:|" * len(LAYERS)]
    for name, formula in formulas.items():
        cells = []
        for layer in LAYERS.values():
            hidden, top_k = layer.hidden_size, layer.top_k
            numbers = {
                "ring_of_experts": 2 * others * tokens * hidden,
                "ragged_all_to_all": 2 * top_k * others * tokens * hidden // num_ranks,
                "ep-tp": 2 * others * (num_ranks * tokens) * hidden // num_ranks,
                "gather_weights": 3 * others * layer.num_experts * hidden * layer.intermediate_size // num_ranks,
            }
            cells.append(f"{numbers[name] * itemsize / GIB:.2f} GiB")
        lines.append(f"| {name} | {formula} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(bytes_table())
    for name in STRATEGIES:
        picture(name).savefig(FOLDER / f"dispatch_{name}.png", dpi=80, metadata={"Software": None})
