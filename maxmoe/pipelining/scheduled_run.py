"""Runs the stages of this rank with a schedule of `torch.distributed.pipelining`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.parallel.apply.fsdp import fsdp_modules
from maxmoe.parallel.apply.interruptions import AfterInterruption
from maxmoe.pipelining.micro_batches import MicroBatch
from maxmoe.pipelining.schedules import ScheduleKind
from maxmoe.pipelining.stage import Stage
from maxmoe.sharding.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


class ScheduledRun:
    """The stages of this rank and the schedule in which they run.

    torch passes the numbers of the micro-batches through its schedule; the stages hold the micro-batches themselves.
    All shapes are given, because torch would otherwise find them by running the stages on uninitialized memory.

    `stages` has the stages of this rank, in ascending order; `num_stages` counts the stages of all ranks; `group` is
    the process group over the stages, None if one rank has all; `mesh` has the ranks of this rank's stage.
    """

    def __init__(
        self,
        kind: ScheduleKind,
        stages: Sequence[Stage],
        num_stages: int,
        num_micro_batches: int,
        group: dist.ProcessGroup | None,
        mesh: Mesh,
    ) -> None:
        self.num_micro_batches, self.group, self.device = num_micro_batches, group, mesh.device_type
        self._kind, self._stages, self._num_stages = kind, stages, num_stages
        self._schedule: Any = None
        has_fsdp = any(module for stage in stages for module in fsdp_modules(stage))
        self._after, self._is_interrupted = AfterInterruption("the pipeline", mesh, has_fsdp=has_fsdp), False
        # torch takes no group for the default group, which is larger if other axes have ranks.
        self._group_of_messages = group or dist.new_group([dist.get_rank()], use_local_synchronization=True)

        self.has_last_stage = any(stage.is_last for stage in stages)

    def set_boundary(self, hidden_states: Tensor) -> None:
        """Set the shape and dtype of the hidden states between stages, for the largest micro-batch."""
        old, new = self._stages[0].boundary, hidden_states
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            self._schedule = None
            for stage in self._stages:
                stage.boundary = torch.empty(new.shape, dtype=new.dtype, device="meta", requires_grad=True)

    def run(self, micro_batches: list[MicroBatch], *, with_backward: bool) -> list[Tensor]:
        """Run all micro-batches, and return their losses if this rank has the last stage."""
        self._begin(micro_batches)
        try:
            if with_backward:
                self._train()
            else:
                self._evaluate()
        except BaseException as error:
            self._schedule = None  # the state of a schedule that was interrupted cannot be used again
            self._recover()
            failure = _error_of_stage(error)
        else:
            return [loss for stage in self._stages for loss in stage.end()]
        raise failure  # outside of the handler, so that torch's error does not become its context

    def _begin(self, micro_batches: list[MicroBatch]) -> None:
        """Give the stages the micro-batches of a step; raise if the step before was interrupted."""
        if self._is_interrupted:
            raise RuntimeError(
                f"an exception has interrupted the step before on rank {dist.get_rank()}, and messages of that step "
                "may be on their way between the stages: end all ranks, and resume from a checkpoint"
            )
        self._after.begin_call()
        for stage in self._stages:
            stage.begin(micro_batches)

    def _recover(self) -> None:
        """Bring the stages into the state before the step. What they have sent cannot be taken back."""
        for stage in self._stages:
            stage.recover()
        self._is_interrupted = self.group is not None
        self._after.note("step")

    def _train(self) -> None:
        numbers = torch.arange(self.num_micro_batches)
        inputs = (numbers,) if any(stage.is_first for stage in self._stages) else ()
        with self._gradients_kept():
            self._schedule = self._schedule or self._make_schedule()
            self._schedule.step(*inputs, target=numbers, return_outputs=False, micro_batch=numbers)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Run all micro-batches through the first stage of this rank, then through the next one.

        torch's schedules evaluate with the order of the training, and those with a V shape not at all.
        """
        messages: list[tuple[dist.Work | None, Tensor]] = []
        local: dict[int, list[Tensor]] = {}
        for stage in self._stages:
            outputs = []
            for number in range(self.num_micro_batches):
                x = local[stage.index - 1][number] if stage.index - 1 in local else self._receive(stage)
                outputs.append(stage(x, torch.tensor([number])))
                if not stage.is_last and (to := self._rank_of(stage.index + 1)) != dist.get_rank():
                    work = dist.isend(outputs[-1], to, group=self._group_of_messages)
                    messages.append((work, outputs.pop()))
            local[stage.index] = outputs
        for work, _ in messages:
            if work is not None:
                work.wait()
        for module in (module for stage in self._stages for module in fsdp_modules(stage)):
            module.reshard()  # which FSDP2 keeps gathered from the forward to the backward

    def _receive(self, stage: Stage) -> Tensor:
        """Receive the hidden states of the previous stage from another rank; nothing in the first stage."""
        if stage.is_first:
            return torch.empty(0)
        x = torch.empty_like(stage.boundary, device=self.device, requires_grad=False)
        dist.recv(x, self._rank_of(stage.index - 1), group=self._group_of_messages)
        return x

    def _rank_of(self, stage: int) -> int:
        """Return the rank in the world that has a stage."""
        ranks = dist.get_process_group_ranks(self._group_of_messages)
        return ranks[self._kind.rank_of(stage, len(ranks))]

    def _make_schedule(self) -> Any:
        stages: Any = [self._torch_stage(stage) for stage in self._stages]
        return self._kind.make(
            stages[0] if self._kind.has_one_stage else stages,
            self.num_micro_batches,
            loss_fn=lambda output, _target: output,  # the output of the last stage is the loss
            scale_grads=False,
        )

    def _torch_stage(self, stage: Stage) -> "PipelineStage":
        from torch.distributed.pipelining import PipelineStage  # imports the compiler, see ScheduleKind

        number = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        return PipelineStage(
            stage,
            stage.index,
            self._num_stages,
            torch.device(self.device),
            input_args=number if stage.is_first else stage.boundary,
            output_args=loss if stage.is_last else stage.boundary,
            group=self._group_of_messages,
            # Given a function for the gradients of the weights, torch computes all gradients of a micro-batch at once.
            dw_builder=(lambda: _nothing) if self._kind.splits_backward and stage.needs_whole_backward else None,
        )

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Keep the gradients of earlier steps: torch drops the gradients of FSDP2 in the first step of a schedule."""
        if self._schedule is not None:
            yield
            return
        parameters = [parameter for stage in self._stages for parameter in stage.parameters()]
        kept = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad


def _nothing() -> None:
    """Compute the gradients of the weights in a split backward: they are computed already."""


def _error_of_stage(error: BaseException) -> BaseException:
    """Return the error of a module in a stage, which torch wraps in one that lists the tensors of the stage."""
    is_wrapper = isinstance(error, RuntimeError) and "failed to run" in str(error).lower()
    return error.__cause__ if is_wrapper and error.__cause__ is not None else error
