"""Stages of `torch.distributed.pipelining`, alone and with data parallelism inside of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from support.compared_models import WIDTH, Case, whole_batch

NUM_RANKS, MICRO_BATCHES = 2, 4  # per pipeline
Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]


def build_blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def sequences(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """The batch of a rank: all ranks of a pipeline have the same sequences."""
    part, parts = rank // NUM_RANKS, max(num_ranks // NUM_RANKS, 1)
    x, target = whole_batch()
    return x.chunk(parts)[part], target.chunk(parts)[part]


def alone(module: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    return module


def ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group())


def fsdp2(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(module, mesh=mesh)


def stages(schedule: Any, wrap: Wrap, model: Any) -> nn.Module:
    """The blocks of this rank, under their names, and a schedule that trains them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // NUM_RANKS, NUM_RANKS), mesh_dim_names=("data", "pipeline"))
    rank, group = mesh.get_local_rank("pipeline"), mesh.get_group("pipeline")
    is_single, is_in_v = schedule is Schedule1F1B, schedule is ScheduleDualPipeV
    numbers = [rank] if is_single else [rank, 3 - rank if is_in_v else rank + NUM_RANKS]
    blocks: Any = nn.Module()
    parts = []
    for number in numbers:
        names = [str(2 * number), str(2 * number + 1)] if is_single else [str(number)]
        stage = wrap(nn.Sequential(*(getattr(model, name) for name in names)), mesh["data"])
        inner = stage.module if isinstance(stage, nn.parallel.DistributedDataParallel) else stage
        for name, block in zip(names, inner, strict=True):
            blocks.add_module(name, block)
        parts.append(PipelineStage(stage, number, 2 if is_single else 4, torch.device("cpu"), group=group))
    blocks.ends = numbers[0] == 0, parts[-1].is_last
    object.__setattr__(
        blocks, "schedule", schedule(parts[0] if is_single else parts, MICRO_BATCHES, loss_fn=F.mse_loss)
    )
    return blocks


def step(blocks: Any, batch: tuple[Tensor, Tensor]) -> Tensor | None:
    is_first, is_last = blocks.ends
    losses: list[Tensor] = []
    keywords = {"target": batch[1], "losses": losses} if is_last else {}
    blocks.schedule.step(*batch[:1] if is_first else (), **keywords)
    return torch.stack(losses).mean() if is_last else None


def case(schedule: Any, wrap: Wrap = alone) -> Case:
    num_ranks = NUM_RANKS if wrap is alone else 2 * NUM_RANKS
    return Case(partial(stages, schedule, wrap), num_ranks, step, loss, sequences, build_blocks)


ONE_STAGE, TWO_STAGES = case(Schedule1F1B, ddp), case(ScheduleInterleaved1F1B, fsdp2)
IN_A_V = case(ScheduleDualPipeV)
# pytorch/pytorch#144530: the gradients of weights are taken without the hooks by which DDP reduces them.
NOT_REDUCED = case(ScheduleInterleavedZeroBubble, ddp)
