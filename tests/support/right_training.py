"""Training on several ranks whose gradients equal one process's: with torch alone, and by hand."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from support.compared_models import (
    REPLICATED,
    Case,
    Model,
    Terms,
    accumulate,
    alone,
    build,
    ddp,
    expert_and_data_parallel,
    expert_parallel,
    fsdp2,
    other_lengths,
    same_batch,
    share_of_loss,
    whole_batch,
)
from support.parallel_by_hand import (
    TensorParallelByHand,
    build_dense,
    build_list,
    dense_loss,
    keep_experts,
    reduced,
    share_of_dense_loss,
)


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tensor_parallel_and_fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def batch_of_replica(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Two ranks have the same sequences."""
    x, target = whole_batch()
    count = max(num_ranks // 2, 1)
    return x.chunk(count)[rank // 2], target.chunk(count)[rank // 2]


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


def build_frozen() -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    model.first.requires_grad_(False)
    return model


def build_equal() -> nn.Module:
    """Experts whose first matrices have equal values, so that only the gradients tell which ones a rank has."""
    torch.manual_seed(0)
    model = Model()
    nn.init.ones_(model.experts.up)
    return model


def build_tied() -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    model.last.weight = model.first.weight
    return model


def no_sync(model: Any, batch: Any) -> Terms:
    """DDP reduces in the last micro-batch."""

    def before(model: Any, is_last: bool) -> None:
        model.require_backward_grad_sync = is_last

    return accumulate(model, batch, before)


def fsdp2_micro_batches(model: Any, batch: Any) -> Terms:
    return accumulate(model, batch, lambda model, is_last: model.set_requires_gradient_sync(is_last))


def every_second(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """The sequences of a rank, as a sampler of torch distributes them."""
    x, target = whole_batch()
    return x[rank::num_ranks], target[rank::num_ranks]


RIGHT = {
    "DDP": Case(ddp),
    "DDP, sequences dealt in turn": Case(ddp, 2, make_batch=every_second),
    "DDP of a model with other values on each rank": Case(ddp, build=Model),
    "DDP, micro-batches without reduction": Case(ddp, step=no_sync),
    "DDP, frozen parameters": Case(ddp, 2, build=build_frozen),
    "DDP, tied weights": Case(ddp, 2, build=build_tied),
    "DDP, recomputation": Case(ddp, 2, build=partial(build, Recomputed)),
    "FSDP2": Case(fsdp2),
    "FSDP2, sizes that 3 ranks do not divide": Case(fsdp2, 3),
    "FSDP2, micro-batches without reduction": Case(fsdp2, 2, step=fsdp2_micro_batches),
    "FSDP2, recomputation": Case(fsdp2, 2, build=partial(build, Recomputed)),
    "FSDP2 with replicas": Case(hsdp),
    "all-reduce by hand": Case(alone, step=reduced("")),
    "different numbers of tokens": Case(alone, step=reduced(""), loss=share_of_loss, make_batch=other_lengths),
    "tensor parallel": Case(tensor_parallel, 2, loss=dense_loss, make_batch=same_batch, build=build_dense),
    "tensor parallel and FSDP2": Case(
        tensor_parallel_and_fsdp2, loss=dense_loss, make_batch=batch_of_replica, build=build_dense
    ),
    "sequence parallel": Case(
        sequence_parallel, 2, loss=share_of_sequences, make_batch=part_of_sequence, build=build_dense
    ),
    "tensor parallel by hand": Case(TensorParallelByHand, 2, loss=dense_loss, make_batch=same_batch, build=build_dense),
    "expert parallel by hand": Case(expert_parallel, loss=share_of_loss, step=reduced(*REPLICATED)),
    "expert and data parallel by hand": Case(expert_and_data_parallel, loss=share_of_loss, step=reduced(*REPLICATED)),
    "expert parallel, equal values": Case(
        expert_and_data_parallel, loss=share_of_loss, step=reduced(*REPLICATED), build=build_equal
    ),
    "modules of experts on different ranks": Case(
        keep_experts, 2, loss=share_of_dense_loss, step=reduced("router"), build=build_list
    ),
}
