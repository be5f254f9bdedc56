"""`compare_ranks` with the parallelism of transformers: docs/how_to/other_libraries.md."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.small_models import import_models, model_of
from testing.compared_models import Case, compare

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


def loss(model: Any, ids: Tensor) -> Tensor:
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
    case = Case(of_sizes, num_ranks, None, loss, of_rank, of_preset)
    compare(case, dtype=torch.float32 if sizes == EXPERTS_OF_EACH_RANK else None).raise_if_different()
