"""The pictures of pipeline schedules: who computes which micro-batch when, as planned and as recorded.

python docs/pipeline_pictures.py   # writes docs/pipeline_schedules.png and docs/pipeline_recorded.png
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch.distributed.pipelining import PipelineStage

import maxmoe
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.models.decoder import DecoderOutput
from maxmoe.pipelining import Pipeline
from maxmoe.pipelining.schedules import SCHEDULES
from maxmoe.pipelining.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Span,
    Timeline,
    schedule_order,
    simulate,
)
from maxmoe.sharding import Mesh

FOLDER = Path(__file__).parent
NUM_RANKS, NUM_MICRO_BATCHES = 4, 8
# Of the first and of the second stage of a rank.
COLORS = {
    FORWARD: ("#8fbce6", "#3f7fbf"),
    BACKWARD: ("#a9d18e", "#5b8c3a"),
    BACKWARD_INPUT: ("#ffe08a", "#d9a520"),
    BACKWARD_WEIGHT: ("#d9a7e0", "#9a5aa8"),
}
LABELS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "gradient of the input",
    BACKWARD_WEIGHT: "gradients of the weights",
}
# A decoder whose stages take long enough to be seen.
CONFIG = DecoderConfig(
    vocab_size=512,
    hidden_size=256,
    num_layers=8,
    num_heads=4,
    intermediate_size=512,
    moe=maxmoe.MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2),
)


def planned(schedule: str) -> Timeline:
    """Return the timeline of stages with equal work; the stages of a rank take the time 1 together."""
    count = SCHEDULES[schedule].default_stages_per_rank
    order = schedule_order(schedule, NUM_RANKS, None, NUM_MICRO_BATCHES)
    return simulate(order, [1 / count] * (NUM_RANKS * count))


def draw(axes: Axes, timeline: Timeline, title: str) -> None:
    """Draw a row for each rank and a box with the number of the micro-batch for each action."""
    for rank, spans in enumerate(timeline.ranks):
        first = min(span.action.stage for span in spans)
        for (kind, stage, number), begin, end in spans:
            is_second = stage != first
            box = Rectangle((begin, rank + 0.06), end - begin, 0.88, edgecolor="white", linewidth=0.6)
            box.set_facecolor(COLORS[kind][is_second])
            axes.add_patch(box)
            if end - begin > timeline.duration / 80:
                color = "white" if is_second else "#222222"
                axes.text((begin + end) / 2, rank + 0.5, str(number), ha="center", va="center", fontsize=9, color=color)
    axes.set(xlim=(0, timeline.duration), ylim=(len(timeline.ranks), 0), xticks=[])
    axes.set_yticks([rank + 0.5 for rank in range(len(timeline.ranks))], [f"rank {rank}" for rank in range(NUM_RANKS)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_facecolor("#f0f0f0")
    axes.set_title(title, loc="left", fontsize=11)


def legend(figure: Figure, timelines: Iterable[Timeline]) -> None:
    """Explain the colors that are used."""
    actions = {span.action for timeline in timelines for spans in timeline.ranks for span in spans}
    kinds = {action.kind for action in actions}
    patches = [Patch(color=COLORS[kind][0], label=label) for kind, label in LABELS.items() if kind in kinds]
    if len({action.stage for action in actions}) > NUM_RANKS:
        patches.append(Patch(color="#666666", label="dark: second stage of a rank"))
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=11)


def schedules_picture() -> Figure:
    """Draw all schedules as planned, on one scale of time."""
    figure = Figure(figsize=(9, 13), layout="constrained")
    timelines = {schedule: planned(schedule) for schedule in SCHEDULES}
    longest = max(timeline.duration for timeline in timelines.values())
    for axes, (schedule, timeline) in zip(figure.subplots(len(SCHEDULES), 1), timelines.items(), strict=True):
        draw(axes, timeline, f"{schedule}: idle {timeline.bubble:.0%}")
        axes.set_xlim(0, longest)
    legend(figure, timelines.values())
    return figure


def loss(output: DecoderOutput, targets: torch.Tensor) -> torch.Tensor:
    """Sum the losses of the tokens."""
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")


@contextmanager
def recording() -> Iterator[list[Span]]:
    """Record when the stages of this rank run which action, in seconds since the recording began."""
    spans: list[Span] = []
    first = time.perf_counter()

    def recorded(method: str, kind_of: Callable[..., str | None]) -> Any:
        run = getattr(PipelineStage, method)

        def timed(stage: PipelineStage, micro_batch: int, *arguments: Any, **options: Any) -> Any:
            start = time.perf_counter() - first
            result = run(stage, micro_batch, *arguments, **options)
            if (kind := kind_of(stage, **options)) is not None:
                action = Action(kind, stage.stage_index, micro_batch)
                spans.append(Span(action, start, time.perf_counter() - first))
            return result

        return patch.object(PipelineStage, method, timed)

    def backward(stage: PipelineStage, *, full_backward: bool = True, **_: Any) -> str:
        # With a `dw_builder`, the first half computes all gradients.
        return BACKWARD if full_backward or stage.dw_builder else BACKWARD_INPUT

    with (
        recorded("forward_one_chunk", lambda *_, **__: FORWARD),
        recorded("backward_one_chunk", backward),
        recorded("backward_weight_one_chunk", lambda stage, **_: None if stage.dw_builder else BACKWARD_WEIGHT),
    ):
        yield spans


def record_step(pipeline: Pipeline, inputs: torch.Tensor, targets: torch.Tensor) -> Timeline:
    """Run a step, and return the timeline of all ranks of the default group, one in each stage."""
    dist.barrier()  # the clocks of all ranks start together
    with recording() as spans:
        pipeline.step(inputs, targets)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, spans)
    first = min(rank[0].start for rank in ranks)
    return Timeline(
        tuple(tuple(Span(action, start - first, end - first) for action, start, end in rank) for rank in ranks)
    )


def record(rank: int, store: str, schedule: str, file: str) -> None:
    """Run three steps on one rank, and save the timeline of the last one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    mesh = Mesh({"stage": NUM_RANKS})
    options = {"loss": loss, "schedule": schedule, "num_micro_batches": NUM_MICRO_BATCHES}
    pipeline = maxmoe.pipeline(Decoder(CONFIG), mesh, **options)
    tokens = torch.randint(CONFIG.vocab_size, (NUM_MICRO_BATCHES, 257))
    for _ in range(3):
        timeline = record_step(pipeline, tokens[:, :-1], tokens[:, 1:])
    if rank == 0:
        torch.save(timeline, file)
    dist.destroy_process_group()


def recorded(schedule: str) -> Timeline:
    """Return the timeline of a step on four processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", schedule, f"{folder}/timeline")
        torch.multiprocessing.spawn(record, arguments, nprocs=NUM_RANKS)
        timeline: Timeline = torch.load(f"{folder}/timeline", weights_only=False)
    return timeline


def recorded_picture(schedule: str, timeline: Timeline) -> Figure:
    """Draw a schedule as planned and as it ran."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1)
    expected = planned(schedule)
    draw(top, expected, f"{schedule} as planned: idle {expected.bubble:.0%}")
    draw(
        bottom,
        timeline,
        f"{schedule} on four processes of one machine, {timeline.duration * 1000:.0f} ms: idle {timeline.bubble:.0%}",
    )
    legend(figure, [expected, timeline])
    return figure


if __name__ == "__main__":
    schedules_picture().savefig(FOLDER / "pipeline_schedules.png", dpi=90, metadata={"Software": None})
    run = recorded("1f1b")
    recorded_picture("1f1b", run).savefig(FOLDER / "pipeline_recorded.png", dpi=90, metadata={"Software": None})
