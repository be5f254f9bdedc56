"""Training on several ranks whose gradients are those of one process: with torch alone, by hand, and with maxmoe."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe.pipelining import Pipeline
from maxmoe.sharding import LogicalRules, Mesh
from support import parallel_decoder
from support.compared_models import (
    MICRO_BATCHES,
    Case,
    Model,
    Terms,
    accumulate,
    alone,
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
from support.parts import part_by_definition


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


def build_recomputed() -> nn.Module:
    torch.manual_seed(0)
    return Recomputed()


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


def stages_of_torch(model: Any) -> nn.Module:
    """Norm and up in the first stage, down in the second, with a schedule of torch."""
    rank, parts = dist.get_rank(), (("norm", "up"), ("down",))
    stage: Any = nn.Module()
    for name in parts[rank]:
        stage.add_module(name, getattr(model, name))
    stage.forward = (lambda x: F.gelu(stage.up(stage.norm(x)))) if rank == 0 else (lambda x: stage.down(x))
    # The schedule divides the gradients by the number of micro-batches.
    part = PipelineStage(stage, rank, 2, torch.device("cpu"))
    object.__setattr__(stage, "schedule", ScheduleGPipe(part, MICRO_BATCHES, loss_fn=F.mse_loss))
    return stage


def step_of_stages(stage: Any, batch: tuple[Tensor, Tensor]) -> Tensor | None:
    losses: list[Tensor] = []
    if dist.get_rank() == 0:
        stage.schedule.step(batch[0])
        return None
    stage.schedule.step(target=batch[1], losses=losses)
    return torch.stack(losses).mean()


def decoder_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Terms:
    """The share of these tokens in the mean over all, and the auxiliary loss, which is that of the whole batch."""
    output = model(batch[0])
    token_losses = F.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return {"tokens": token_losses / (parallel_decoder.BATCH * parallel_decoder.LENGTH), "aux": output.aux_loss}


def decoder_batch(sizes: dict[str, int], rules: str, rank: int, num_ranks: int) -> tuple[Tensor, ...]:
    """The tokens of a rank by the rules."""
    if num_ranks == 1:
        return parallel_decoder.batch()
    mesh = Mesh.planned(sizes)
    spec = parallel_decoder.token_spec(mesh, LogicalRules.load(rules))
    return tuple(part_by_definition(tokens, spec, mesh, rank) for tokens in parallel_decoder.batch())


def by_maxmoe(sizes: dict[str, int], rules: str, dispatch: str, model: nn.Module) -> nn.Module:
    return maxmoe.parallelize(model, Mesh(sizes), rules, dispatch=dispatch)  # type: ignore[arg-type]


def decoder_case(rules: str, dispatch: str = "auto", **sizes: int) -> Case:
    return Case(
        partial(by_maxmoe, sizes, rules, dispatch),
        Mesh.planned(sizes).num_ranks,
        loss=decoder_loss,
        make_batch=partial(decoder_batch, sizes, rules),
        build=parallel_decoder.decoder,
    )


def stages_of_maxmoe(model: nn.Module) -> Pipeline:
    def token_losses(output: Any, targets: Tensor) -> Tensor:
        return decoder_loss(lambda _: output, (targets, targets))["tokens"]  # type: ignore[arg-type]

    return maxmoe.pipeline(model, Mesh({"stage": 2}), loss=token_losses, num_micro_batches=4, aux_loss_scale=0.25)


def step_of_pipeline(pipeline: Pipeline, batch: tuple[Tensor, Tensor]) -> Terms:
    output = pipeline.step(*batch)
    return {"tokens": output.loss, "aux": output.aux_loss}


REPLICATED = ("first", "last", "norm", "router")
RIGHT = {
    "DDP": Case(ddp),
    "DDP of a model with other values on each rank": Case(ddp, build=Model),
    "DDP, micro-batches without reduction": Case(ddp, step=no_sync),
    "DDP, frozen parameters": Case(ddp, 2, build=build_frozen),
    "DDP, tied weights": Case(ddp, 2, build=build_tied),
    "DDP, recomputation": Case(ddp, 2, build=build_recomputed),
    "FSDP2": Case(fsdp2),
    "FSDP2, sizes that 3 ranks do not divide": Case(fsdp2, 3),
    "FSDP2, micro-batches without reduction": Case(fsdp2, 2, step=fsdp2_micro_batches),
    "FSDP2, recomputation": Case(fsdp2, 2, build=build_recomputed),
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
    "stages of torch": Case(
        stages_of_torch, 2, loss=dense_loss, step=step_of_stages, make_batch=same_batch, build=build_dense
    ),
    "ring of experts": decoder_case("ep-as-dp", "ring_of_experts", expert=2),
    "ragged all-to-all": decoder_case("ep-as-dp", "ragged_all_to_all", expert=2),
    "gathered weights": decoder_case("ep-as-dp", "gather_weights", expert=2),
    "experts and FSDP2": decoder_case("ep-as-dp", fsdp=2, expert=2),
    "expert and tensor parallel": decoder_case("ep-tp", data=2, expert=2),
    "context parallel": decoder_case("cp-as-ep", context=2),
    "tensor parallel by rules": decoder_case("default", tensor=2),
    "stages of maxmoe": Case(
        stages_of_maxmoe,
        2,
        step=step_of_pipeline,
        loss=decoder_loss,
        make_batch=partial(decoder_batch, {"stage": 2}, "default"),
        build=parallel_decoder.decoder,
    ),
}
