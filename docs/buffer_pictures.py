"""The picture of docs/how_to/buffers.md: the memory of a step at several loads, estimated.

python docs/buffer_pictures.py   # writes docs/how_to/buffers.png
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from maxmoe import MoEConfig
from maxmoe.costs import estimate
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import Mesh

PICTURE = Path(__file__).parent / "how_to" / "buffers.png"
NUM_RANKS, LENGTH = 4, 2048
DISPATCHES: tuple[Dispatch, ...] = ("ragged_all_to_all", "ring_of_experts")
BUFFERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no buffer": ({}, "#b5541c", "-"),
    'buffer_factor=1.25, overflow="chunks"': ({"buffer_factor": 1.25, "overflow": "chunks"}, "#1b6ca8", "-"),
    'buffer_factor=1.25, overflow="drop"': ({"buffer_factor": 1.25}, "#888888", "--"),
}


def peak(dispatch: Dispatch, imbalance: float, buffer: dict[str, Any]) -> float:
    """GiB of activations and temporary tensors on the rank with the most rows."""
    moe = MoEConfig(hidden_size=1024, intermediate_size=512, num_experts=32, top_k=8, **buffer)
    config = DecoderConfig(
        vocab_size=1024, hidden_size=1024, num_layers=16, num_heads=16, max_sequence_length=LENGTH, moe=moe
    )
    memory = estimate(
        Decoder(config, device="meta"),
        Mesh.planned({"expert": NUM_RANKS}),
        "ep-as-dp",
        batch_size=NUM_RANKS,
        sequence_length=LENGTH,
        dispatch=dispatch,
        imbalance=imbalance,
    ).memory
    return (memory["activations"] + memory["temporary"]) / 2**30


def picture(imbalances: tuple[float, ...] = (1, 1.25, 1.3, 2, 3, 4)) -> Figure:
    """A panel for each dispatch, a line for each buffer."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for dispatch, axes in zip(DISPATCHES, figure.subplots(1, 2, sharey=True), strict=True):
        for name, (buffer, color, style) in BUFFERS.items():
            peaks = [peak(dispatch, imbalance, buffer) for imbalance in imbalances]
            axes.plot(imbalances, peaks, style, color=color, label=name, marker="o", markersize=3)
        axes.set_title(f'dispatch="{dispatch}"', fontsize=10)
        axes.set_xlabel("rows of the busiest rank / mean")
        axes.set_ylim(0, None)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("peak memory of activations, GiB")
    figure.axes[0].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    picture().savefig(PICTURE, dpi=120)
