"""Stage of `torch.distributed.pipelining` that records when it computes which micro-batch."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from maxmoe.pipelining.timeline import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Span, Timeline


class Recording:
    """Records begin and end of each action of this rank, in seconds since it was switched on.

    Args:
        device: device type of the stages. If it is not the CPU, each action waits for the device while the recording is
            on, because an action returns before the device has computed it.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._spans: list[Span] | None = None
        self._start = 0.0

    @contextmanager
    def on(self) -> Iterator[list[Span]]:
        """Record in a with-block, and yield the list of the recorded actions."""
        spans: list[Span] = []
        self._spans = spans
        self._start = time.perf_counter()
        try:
            yield spans
        finally:
            self._spans = None

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Record an action in a with-block."""
        if self._spans is None:
            yield
            return
        start = time.perf_counter() - self._start
        yield
        if self._device != "cpu":
            torch.accelerator.synchronize()
        self._spans.append(Span(action, start, time.perf_counter() - self._start))


class RecordedStage(PipelineStage):
    """Stage that records its forwards and backwards.

    Args:
        recording: where it records them.
        *args: as `PipelineStage`.
        **options: as `PipelineStage`.
    """

    def __init__(self, recording: Recording, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.recording = recording

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Run the forward of a micro-batch."""
        with self.recording.span(Action(FORWARD, self.stage_index, fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of a micro-batch, or its first half."""
        # With a `dw_builder`, the first half computes all gradients.
        kind = BACKWARD if full_backward or self.dw_builder else BACKWARD_INPUT
        with self.recording.span(Action(kind, self.stage_index, bwd_chunk_id)):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second half of the backward of a micro-batch."""
        is_split = self.dw_builder is None
        action = Action(BACKWARD_WEIGHT, self.stage_index, bwd_chunk_id)
        with self.recording.span(action) if is_split else nullcontext():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def gather_timeline(spans: list[Span], group: dist.ProcessGroup | None) -> Timeline:
    """Return the timeline of all ranks from the actions that each has recorded; collective over the stages."""
    ranks = [spans]
    if group is not None:
        ranks = [[] for _ in range(group.size())]
        dist.all_gather_object(ranks, spans, group=group)
    first = min(rank[0].start for rank in ranks)
    return Timeline(
        tuple(tuple(Span(action, start - first, end - first) for action, start, end in rank) for rank in ranks)
    )
