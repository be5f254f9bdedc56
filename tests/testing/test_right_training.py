"""`compare_ranks` says "equal" of right training on several ranks: with torch, by hand, and with maxmoe."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from maxmoe.pipelining import Pipeline
from maxmoe.sharding import Mesh
from support import staged_decoder
from support.parallel_decoder import batch, decoder
from testing.compared_models import (
    REPLICATED,
    Case,
    Model,
    Terms,
    Update,
    accumulate,
    build,
    build_dense,
    clipped,
    compare,
    ddp,
    dense_loss,
    expert_and_data_parallel,
    fsdp2,
    reduced,
    share_of_loss,
    whole_batch,
)


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def sequence_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    styles = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(model, mesh, styles)


def part_of_sequence(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    x, target = whole_batch()
    return x[:, :4].chunk(num_ranks, 1)[rank], target[:, :4].chunk(num_ranks, 1)[rank]


def share_of_sequences(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return dense_loss(model, batch) * batch[0].shape[1] / 4


class Recomputed(Model):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(super().forward, x, use_reentrant=False)


def build_frozen_and_tied() -> nn.Module:
    model: Any = build()
    model.first.bias.requires_grad_(False)
    model.last.weight = model.first.weight
    return model


def no_sync(model: Any, batch: Any) -> Terms:
    """DDP reduces in the last micro-batch."""

    def before(model: Any, is_last: bool) -> None:
        model.require_backward_grad_sync = is_last

    return accumulate(model, batch, before)


def every_second(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """The sequences of a rank, as a sampler of torch distributes them."""
    x, target = whole_batch()
    return x[rank::num_ranks], target[rank::num_ranks]


def adamw(model: nn.Module) -> Update:
    return clipped(torch.optim.AdamW(model.parameters(), lr=1e-2), model)


def decoder_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Terms:
    output = model(batch[0])
    return {"tokens": staged_decoder.loss(output, batch[1]), "aux": output.aux_loss}


def stages_of_maxmoe(model: nn.Module) -> Pipeline:
    return staged_decoder.staged(model, Mesh({"stage": 2}), aux_loss_scale=1 / staged_decoder.NUM_MICRO_BATCHES)


def step_of_pipeline(pipeline: Pipeline, batch: tuple[Tensor, Tensor]) -> Terms:
    output = pipeline.step(*batch)
    return {"tokens": output.loss, "aux": output.aux_loss}


build_decoder = partial(decoder, staged_decoder.TWO_BLOCKS)
# One of each kind of parallelism, and of each way in which ranks have parts of batch and parameters.
RIGHT = {
    "DDP, sequences dealt in turn": Case(ddp, 2, make_batch=every_second),
    "DDP, micro-batches without reduction": Case(ddp, 2, step=no_sync),
    "DDP, frozen and tied parameters": Case(ddp, 2, build=build_frozen_and_tied),
    "FSDP2, recomputation, sizes that the ranks do not divide": Case(fsdp2, 3, build=partial(build, Recomputed)),
    "FSDP2 with replicas": Case(hsdp),
    "sequence parallel": Case(sequence_parallel, 2, None, share_of_sequences, part_of_sequence, build_dense),
    "expert and data parallel by hand": Case(expert_and_data_parallel, loss=share_of_loss, step=reduced(*REPLICATED)),
    "stages of maxmoe": Case(stages_of_maxmoe, 2, step_of_pipeline, decoder_loss, lambda *_: batch(), build_decoder),
    "three steps with DDP": Case(ddp, 2, make_update=adamw, steps=3),
    "three steps with FSDP2": Case(fsdp2, 2, make_update=adamw, steps=3),
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT)
def test_right_training_is_equal(case: Case) -> None:
    comparison = compare(case)
    comparison.raise_if_different()
    assert all(gradient.error < 1e-12 for gradient in comparison.gradients)
    assert comparison.loss and comparison.gradients and comparison.step == case.steps
