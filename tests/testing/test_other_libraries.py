"""`compare_ranks` with the parallelism of transformers and the steps of accelerate: docs/how_to/other_libraries.md."""

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from support.compared_models import MAX_NORM, MICRO_BATCHES, Case, Update, clipped, loss, micro_batches
from support.forked_comparison import compare
from support.small_models import import_models, model_of

import_models("mixtral", "qwen3_moe", "gpt_oss")
IDS = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(1))
# Sizes that 4 ranks divide.
EXPERTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}
WIDTHS = {"mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size", "gpt_oss": "intermediate_size"}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4}


def build(preset: str) -> nn.Module:
    torch.manual_seed(0)
    model = model_of(preset, num_hidden_layers=2, **{EXPERTS[preset]: 8, WIDTHS[preset]: 8}, **HEADS)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def distribute(sizes: dict[str, Any], model: Any) -> nn.Module:
    """The state that `from_pretrained(distributed_config=...)` sets before it reads weights."""
    from transformers.distributed.configuration_utils import DistributedConfig

    config, _, meshes = type(model).prepare_distribute_model(DistributedConfig(**sizes))
    return type(model).maybe_distribute_model(model, config, meshes)


def ids_of_rank(num_copies: int, rank: int, num_ranks: int) -> Tensor:
    return IDS.chunk(max(num_ranks // num_copies, 1))[rank // num_copies]


def loss_of_ids(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# FSDP2 of torch 2.13 divides twice in float64 if its group, here of the experts, has one rank.
EXPERTS_OF_EACH_RANK = {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize(
    ("preset", "sizes"),
    [
        ("gpt_oss", {"fsdp_size": 2}),
        ("qwen3_moe", {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"}),
        pytest.param("mixtral", {"fsdp_size": 2, "tp_size": 2}, marks=pytest.mark.slow),
        pytest.param(
            "gpt_oss", {"tp_size": 4, "ep_size": 4, "ep_implementation": "all_to_all"}, marks=pytest.mark.slow
        ),
        pytest.param("mixtral", {"fsdp_size": 4, "ep_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", EXPERTS_OF_EACH_RANK, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_parallelism_of_transformers(preset: str, sizes: dict[str, Any]) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")  # from 5.21 on
    num_copies = sizes.get("tp_size", 1)
    num_ranks = sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1) * num_copies
    of_preset, of_sizes, of_rank = partial(build, preset), partial(distribute, sizes), partial(ids_of_rank, num_copies)
    case = Case(of_sizes, num_ranks, None, loss_of_ids, of_rank, of_preset)
    compare(case, dtype=torch.float32 if sizes == EXPERTS_OF_EACH_RANK else None).raise_if_different()


def total(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack([*loss(model, batch).values()]).sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def of_accelerate(model: nn.Module) -> nn.Module:
    from accelerate import Accelerator

    rank, size = str(dist.get_rank()), str(dist.get_world_size())  # as a launcher sets them
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    prepared, optimizer = accelerator.prepare(model, sgd(model))
    object.__setattr__(prepared, "accelerated", (accelerator, optimizer))
    return prepared


def accumulated(model: Any, batch: Any) -> Tensor:
    accelerator, _ = model.accelerated
    losses = []
    for micro_batch in micro_batches(batch):
        with accelerator.accumulate(model):
            losses.append(total(model, micro_batch))
            accelerator.backward(losses[-1])
    return torch.stack(losses).mean().detach()


def update_of_accelerate(model: Any) -> Update:
    if not dist.is_initialized():
        return clipped(sgd(model), model)
    accelerator, optimizer = model.accelerated
    return clipped(optimizer, model, partial(accelerator.clip_grad_norm_, max_norm=MAX_NORM))


def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    case = Case(of_accelerate, 2, step=accumulated, loss=total, make_update=update_of_accelerate, steps=3)
    compare(case).raise_if_different()
