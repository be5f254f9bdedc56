"""Measured steps of plans on 1 to 8 gloo ranks beside their predicted times.

    python -m benchmarks.planned_steps

Three model shapes on 1, 2, 4 and 8 processes of this machine, with several meshes, rules and strategies on each. The
machine is calibrated first, as by `python -m maxmoe plan --calibrate`. Writes a table, a picture and results.json.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmarks import machine
from benchmarks.calibration import calibrate
from maxmoe import MoEConfig, parallelize
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.parallel import token_sharding
from maxmoe.planning import Device, predict
from maxmoe.ranks.rank_processes import RankProcesses
from maxmoe.sharding import Mesh

BATCH, LENGTH = 16, 128


@dataclass(frozen=True)
class Shape:
    """Sizes of a small decoder."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_layers: int

    def config(self) -> DecoderConfig:
        """Config of the decoder."""
        moe = MoEConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
        )
        return DecoderConfig(
            vocab_size=512, hidden_size=self.hidden_size, num_layers=self.num_layers, num_heads=8, moe=moe
        )


SHAPES = {
    "many small experts": Shape(128, 64, 32, 4, 4),
    "few large experts": Shape(192, 512, 8, 2, 3),
    "narrow and deep": Shape(64, 128, 16, 2, 8),
}


class Plan(NamedTuple):
    """A plan: arguments of `parallelize`."""

    mesh: dict[str, int]
    rules: str
    dispatch: str = "auto"
    num_chunks: int = 1
    recompute: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        extra = (f", {self.num_chunks} chunks" if self.num_chunks > 1 else "") + "".join(
            f", recompute {name}" for name in self.recompute
        )
        return f"{self.rules} {mesh or 'one rank'} {self.dispatch}{extra}"


def plans(num_ranks: int) -> list[Plan]:
    """Plans to measure on a number of ranks."""
    if num_ranks == 1:
        return [Plan({"data": 1}, "default"), Plan({"data": 1}, "default", recompute=("blocks",))]
    half = num_ranks // 2
    chosen = [
        Plan({"fsdp": num_ranks}, "pure-fsdp"),
        Plan({"expert": num_ranks}, "ep-as-dp", "ragged_all_to_all"),
        Plan({"expert": num_ranks}, "ep-as-dp", "ring_of_experts"),
        Plan({"data": half, "expert": 2}, "ep-tp"),
    ]
    if num_ranks > 2:
        chosen.append(Plan({"fsdp": half, "expert": 2}, "ep-as-dp", "ragged_all_to_all"))
    return chosen


def measure(requests: Sequence[tuple[Shape, Plan]], num_steps: int) -> list[float]:
    """Median seconds of a step of each plan; runs on every rank."""
    torch.set_num_threads(1)
    return [_seconds(shape, plan, num_steps) for shape, plan in requests]


def _seconds(shape: Shape, plan: Plan, num_steps: int) -> float:
    torch.manual_seed(0)
    mesh = Mesh(plan.mesh)
    model = parallelize(
        Decoder(shape.config()),
        mesh,
        plan.rules,
        dispatch=plan.dispatch,
        num_chunks=plan.num_chunks,
        recompute=plan.recompute,
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(512, (BATCH, LENGTH + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    mine = token_sharding(mesh, plan.rules).slices(inputs.shape)
    times = []
    for _ in range(num_steps + 1):
        torch.distributed.barrier()
        begin = time.perf_counter()
        output = model(inputs[mine])
        loss = F.cross_entropy(output.logits.flatten(0, 1), targets[mine].flatten(), reduction="sum")
        (loss / inputs.numel() + output.aux_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.barrier()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


class Row(NamedTuple):
    """A measured plan with its prediction."""

    shape: str
    num_ranks: int
    plan: str
    measured: float
    predicted: float


def ranks_of(values: Sequence[float]) -> list[float]:
    """Ranks of values, the mean rank for equal ones."""
    ordered = sorted(values)
    return [(ordered.index(value) + len(ordered) - 1 - ordered[::-1].index(value)) / 2 for value in values]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    table = torch.tensor([ranks_of(first), ranks_of(second)], dtype=torch.float64)
    return float(torch.corrcoef(table)[0, 1])


def distances(rows: Sequence[Row]) -> dict[str, float]:
    """Relative extra time of the plan with the least predicted time over the fastest measured one, by shape."""
    result = {}
    for shape in dict.fromkeys(row.shape for row in rows):
        mine = [row for row in rows if row.shape == shape]
        found = min(mine, key=lambda row: row.predicted)
        result[shape] = found.measured / min(row.measured for row in mine) - 1
    return result


def report(rows: Sequence[Row]) -> str:
    """The table in Markdown, with the two numbers."""
    lines = ["| shape | ranks | plan | measured | predicted |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row.shape, row.measured)):
        times = f"{row.measured * 1e3:.0f} ms | {row.predicted * 1e3:.0f} ms"
        lines.append(f"| {row.shape} | {row.num_ranks} | {row.plan} | {times} |")
    correlation = rank_correlation([row.measured for row in rows], [row.predicted for row in rows])
    lines += ["", f"{len(rows)} plans, rank correlation {correlation:.3f}."]
    for shape in SHAPES:
        mine = [row for row in rows if row.shape == shape]
        if len(mine) > 2:
            own = rank_correlation([row.measured for row in mine], [row.predicted for row in mine])
            lines.append(
                f"{shape}: {own:.3f}; the plan found is {distances(mine)[shape]:.1%} from the fastest measured."
            )
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Measured against predicted times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    markers = {1: "o", 2: "s", 4: "^", 8: "D"}
    for color, shape in enumerate(SHAPES):
        for num_ranks, marker in markers.items():
            mine = [row for row in rows if row.shape == shape and row.num_ranks == num_ranks]
            label = shape if num_ranks == 1 else None
            axes.scatter(
                [row.predicted * 1e3 for row in mine],
                [row.measured * 1e3 for row in mine],
                marker=marker,
                color=f"C{color}",
                label=label,
            )
    low = min(min(row.measured, row.predicted) for row in rows) * 1e3
    high = max(max(row.measured, row.predicted) for row in rows) * 1e3
    axes.plot([low, high], [low, high], color="gray", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="predicted ms", ylabel="measured ms")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.set_title("Steps on 1 (circle), 2 (square), 4 (triangle) and 8 (diamond) ranks", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/planned_steps"), help="folder of the results")
    parser.add_argument("--steps", type=int, default=5, help="steps of each plan, after one that is not counted")
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of processes")
    parser.add_argument("--device", type=Path, help="device file; without it, this machine is calibrated")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = Device.load(options.device) if options.device else calibrate("this machine")
    device.save(options.out / "device.yaml")
    rows = []
    for num_ranks in (bar := tqdm([int(number) for number in options.ranks.split(",")], dynamic_ncols=True)):
        bar.set_description(f"{num_ranks} ranks")
        requests = [(shape, plan) for shape in SHAPES for plan in plans(num_ranks)]
        processes = RankProcesses(deadline=600.0)
        arguments = [(SHAPES[shape], plan) for shape, plan in requests]
        times = processes.run(measure, num_ranks, arguments, options.steps)
        for (shape, plan), measured in zip(requests, map(max, zip(*times, strict=True)), strict=True):
            model = Decoder(SHAPES[shape].config(), device="meta")
            step = {"batch_size": BATCH, "sequence_length": LENGTH, "dispatch": plan.dispatch}
            step |= {"num_chunks": plan.num_chunks, "recompute": plan.recompute}
            found = predict(model, Mesh.planned(plan.mesh), plan.rules, device, **step)
            rows.append(Row(shape, num_ranks, plan.label, measured, found.seconds))
        write(rows, options.out)
    print(report(rows))


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write the measurements so far."""
    (folder / "table.md").write_text(report(rows) + "\n")
    draw(rows, folder / "planned_steps.png")
    contents = {"machine": machine.describe(), "rows": [row._asdict() for row in rows]}
    (folder / "results.json").write_text(json.dumps(contents, indent=1) + "\n")


if __name__ == "__main__":
    main()
