"""The tables and the pictures of docs/sharding.md: which rank holds which block of a weight under each preset.

python docs/sharding_tables.py   # prints the tables, writes docs/sharding_*.png
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

from maxmoe import MoEConfig
from maxmoe.costs import Traffic, estimate
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.sharding import LogicalRules, Mesh, NamedSharding, logical_to_mesh_axes, resolve

FOLDER = Path(__file__).parent

# Every preset on a mesh that shows what it does.
MESHES = {
    "default": {"fsdp": 2, "expert": 2, "tensor": 2},
    "pure-fsdp": {"fsdp": 4},
    "ep-as-dp": {"fsdp": 2, "expert": 2},
    "fsdp-as-dp-for-attn": {"fsdp": 2, "expert": 2},
    "ep-as-cp": {"fsdp": 2, "expert": 2},
    "cp-as-ep": {"context": 2, "expert": 2},
    "pipeline-large-moe": {"expert": 2, "tensor": 2},
    "shard-exp-on-fsdp": {"fsdp": 2, "expert": 2},
    "ep-tp": {"data": 2, "expert": 2},
}
EXPERTS = ("exp", "embed_moe", "mlp_moe")
DENSE = ("embed", "mlp")
# The columns of the table for what a step calls by other names.
COLUMNS = {
    "a sharded sequence": "keys and values",
    "the output of Attention": "partial outputs",
    "outputs of a layer": "partial outputs",
}
LENGTH = 8  # of every dim but the experts
NUM_EXPERTS = 4
COLORS = ["#8fbce6", "#f4b183", "#a9d18e", "#d9a7e0", "#ffe08a", "#9fd8d6", "#e6a3a3", "#c8c8c8"]


def sharding(preset: str, names: Sequence[str]) -> NamedSharding:
    """Of a weight with these names, under a preset on its mesh."""
    mesh = Mesh.planned(MESHES[preset])
    spec = logical_to_mesh_axes(names, LogicalRules.load(preset))
    return NamedSharding(mesh, resolve(spec, mesh.sizes, shape(names)).spec)


def shape(names: Sequence[str]) -> tuple[int, ...]:
    """Of the drawn weight with these names."""
    return tuple(NUM_EXPERTS if name == "exp" else LENGTH for name in names)


def holders(preset: str, names: Sequence[str]) -> dict[tuple[tuple[int, int], ...], list[int]]:
    """For each block of a weight, from where to where in each dim, the ranks that hold it."""
    placed = sharding(preset, names)
    blocks = defaultdict(list)
    for rank in range(placed.mesh.num_ranks):
        blocks[tuple((part.start, part.stop) for part in placed.slices(shape(names), rank))].append(rank)
    return dict(sorted(blocks.items()))


def spec_text(preset: str, names: Sequence[str]) -> str:
    """The spec of a weight as in Python."""
    return f"`{sharding(preset, names).spec!r}`"


def placements() -> str:
    """Who holds what, on the meshes of the pictures, as a table in Markdown."""
    lines = [
        "| preset | mesh | of experts: `[E, D, F]` | part of a rank | dense: `[D, F]` | part of a rank |",
        "|---|---|---|---|---|---|",
    ]
    for preset, sizes in MESHES.items():
        mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        cells = [preset, mesh]
        for names in (EXPERTS, DENSE):
            parts = sharding(preset, names).shard_shape(shape(names))
            letters = "EDF" if names is EXPERTS else "DF"
            fractions = [
                letter if part == length else f"{letter}/{length // part}"
                for letter, part, length in zip(letters, parts, shape(names), strict=True)
            ]
            cells += [spec_text(preset, names), f"[{', '.join(fractions)}]"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def collectives() -> str:
    """The collectives in a step of a small decoder, on a mesh of all axes of the rules, as a table in Markdown."""
    lines = [
        "| preset | weights: all-gather over | their gradients: reduction over | keys and values: all-gather over "
        "| partial outputs: sum over | tokens travel to experts over |",
        "|---|---|---|---|---|---|",
    ]
    for preset in MESHES:
        over: dict[str, dict[str, None]] = defaultdict(dict)
        for row in traffic(preset):
            name = row.purpose.split(",")[0]
            if name != "gradients of weights" or row.kind != "all-gather":
                over[COLUMNS.get(name, name)] |= dict.fromkeys(row.axis.split(", "))
        columns = ("weights", "gradients of weights", "keys and values", "partial outputs", "tokens to experts")
        cells = [", ".join(sorted(over[column])) or "-" for column in columns]
        lines.append(f"| {preset} | {' | '.join(cells)} |")
    return "\n".join(lines)


def traffic(preset: str) -> tuple[Traffic, ...]:
    """Of a step of a decoder whose dims divide by everything."""
    rules = LogicalRules.load(preset)
    axes = sorted({axis for _, some in rules for axis in some})
    moe = MoEConfig(hidden_size=128, intermediate_size=128, num_experts=128, top_k=2, num_shared_experts=1)
    config = DecoderConfig(vocab_size=128, hidden_size=128, num_layers=1, num_heads=128, head_dim=2, moe=moe)
    mesh = Mesh.planned(dict.fromkeys(axes, 2))
    model = Decoder(config, device="meta")
    return estimate(model, mesh, rules, batch_size=128, sequence_length=128).traffic


def picture(preset: str) -> Figure:
    """Draw an expert weight [E, D, F], one panel per expert, and a dense weight [D, F]."""
    mesh = Mesh.planned(MESHES[preset])
    figure = Figure(figsize=(11, 3.1 if mesh.num_ranks == 4 else 3.3), layout="constrained")
    *panels, gap, dense = figure.subplots(1, NUM_EXPERTS + 2, width_ratios=[1] * NUM_EXPERTS + [0.05, 1])
    gap.set_axis_off()
    for block, ranks in holders(preset, EXPERTS).items():
        (first, last), *sides = block
        for expert in range(first, last):
            draw_block(panels[expert], sides, ranks)
    for block, ranks in holders(preset, DENSE).items():
        draw_block(dense, block, ranks)
    for panel, title in zip([*panels, dense], [*map("expert {}".format, range(NUM_EXPERTS)), "dense"], strict=True):
        panel.set(xlim=(0, LENGTH), ylim=(LENGTH, 0), aspect="equal", xlabel="F", xticks=[], yticks=[])
        panel.set_ylabel("D", rotation=0, labelpad=8, va="center")
        panel.set_title(title, fontsize=11)
    patches = []
    for rank in range(mesh.num_ranks):
        place = " ".join(f"{axis}={coordinate}" for axis, coordinate in mesh.coordinates(rank).items())
        patches.append(Patch(color=COLORS[rank], label=f"rank {rank}: {place}"))
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=9, columnspacing=1)
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.sizes.items())
    figure.suptitle(f"{preset} on {sizes}", fontweight="bold", fontsize=13)
    return figure


def draw_block(panel: Axes, block: Sequence[tuple[int, int]], ranks: Sequence[int]) -> None:
    """Draw a block in the colors of all ranks that hold it, in slanting bands if there are several."""
    (top, bottom), (left, right) = block
    frame = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor="#333333", linewidth=1.5, zorder=2)
    panel.add_patch(frame)
    width, height = 1.0, bottom - top
    bands = 2 * LENGTH if len(ranks) > 1 else 1
    for band in range(bands):
        start = left - height + band * width if len(ranks) > 1 else left
        end, slant = (start + width, height) if len(ranks) > 1 else (right, 0)
        corners = [(start + slant, top), (end + slant, top), (end, bottom), (start, bottom)]
        color = COLORS[ranks[band % len(ranks)]]
        panel.add_patch(Polygon(corners, color=color, linewidth=0)).set_clip_path(frame)
    behind = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    label = " ".join(map(str, ranks))
    middle = ((left + right) / 2, (top + bottom) / 2)
    panel.text(*middle, label, ha="center", va="center", fontsize=11, bbox=behind if len(ranks) > 1 else None)


if __name__ == "__main__":
    print(f"{placements()}\n\n{collectives()}")
    for name in MESHES:
        picture(name).savefig(FOLDER / f"sharding_{name}.png", dpi=80, metadata={"Software": None})
