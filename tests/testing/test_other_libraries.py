"""What `compare_ranks` says of FSDP2 and of the expert parallelism of transformers: docs/how_to/compare_ranks.md."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from support.compared_models import Case
from support.forked_comparison import compare
from support.small_models import import_models, model_of

import_models("mixtral", "gpt_oss")
IDS = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(1))
# FSDP2 of torch 2.13 divides twice in float64 and float16 if its group has one rank.
HALVED = "0.5 times: 1 / number of ranks"


def build(preset: str) -> nn.Module:
    torch.manual_seed(0)
    model = model_of(preset, num_hidden_layers=2)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def distribute(sizes: dict[str, int], model: Any) -> nn.Module:
    """As `from_pretrained(distributed_config=...)` does before it reads weights."""
    from transformers.distributed.configuration_utils import DistributedConfig

    config, _, meshes = type(model).prepare_distribute_model(DistributedConfig(**sizes))
    return type(model).maybe_distribute_model(model, config, meshes)


def ids_of_rank(num_copies: int, rank: int, num_ranks: int) -> Tensor:
    return IDS.chunk(max(num_ranks // num_copies, 1))[rank // num_copies]


def loss(model: Any, ids: Tensor) -> Tensor:
    return token_loss(model(input_ids=ids, use_cache=False).logits, ids)


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss_and_aux_loss(model: Any, ids: Tensor) -> dict[str, Tensor]:
    output = model(input_ids=ids, use_cache=False, output_router_logits=True)
    return {"tokens": token_loss(output.logits, ids), "aux": output.aux_loss}


def case(preset: str, loss: Any = loss, **sizes: int) -> Case:
    num_copies = sizes.get("tp_size", 1)
    return Case(
        partial(distribute, sizes),
        sizes.get("fsdp_size", 1) * num_copies,
        loss=loss,
        make_batch=partial(ids_of_rank, num_copies),
        build=partial(build, preset),
    )


@pytest.fixture(autouse=True)
def expert_parallelism() -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")  # from 5.21 on


EXPERTS_OF_TWO_RANKS = {"fsdp_size": 2, "ep_size": 2}


@pytest.mark.parametrize(
    ("preset", "sizes"),
    [
        ("mixtral", {"fsdp_size": 2}),
        ("mixtral", {"tp_size": 2, "ep_size": 2}),
        ("mixtral", {"fsdp_size": 4, "ep_size": 2}),
        ("mixtral", EXPERTS_OF_TWO_RANKS),
        ("gpt_oss", EXPERTS_OF_TWO_RANKS),
    ],
    ids=str,
)
def test_expert_parallelism_of_transformers(preset: str, sizes: dict[str, int]) -> None:
    dtype = torch.float32 if sizes == EXPERTS_OF_TWO_RANKS else None
    compare(case(preset, **sizes), dtype=dtype).raise_if_different()


def test_gradients_of_experts_are_divided_twice_in_float64() -> None:
    comparison = compare(case("mixtral", **EXPERTS_OF_TWO_RANKS))
    wrong = {gradient.name: gradient.explanation for gradient in comparison.gradients if not gradient.equal}
    assert set(wrong.values()) == {HALVED} and all(".experts." in name for name in wrong)
    assert comparison.notes[-1].startswith("All are equal in float32")


def divided(model: nn.Module) -> nn.Module:
    """FSDP2 of experts on groups of one rank, whose gradients are to be divided by 2."""
    meshes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "expert"))
    fully_shard(model, mesh=meshes["shard"])
    model.set_gradient_divide_factor(2.0)  # type: ignore[operator]
    return model


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, ""), (torch.float64, HALVED)], ids=str)
def test_a_divide_factor_on_a_group_of_one_rank(dtype: torch.dtype, expected: str) -> None:
    """The same without transformers: a factor of 2 undoes a loss that is twice as large on the ranks."""

    def step(model: nn.Module, batch: Tensor) -> None:
        (2 * mean_square(model, batch)).backward()

    def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(8, 8)

    def batch(_rank: int, _num_ranks: int) -> Tensor:
        return torch.randn(24, 8, generator=torch.Generator().manual_seed(1))

    comparison = compare(Case(divided, 2, step, mean_square, batch, build), dtype=dtype)
    assert {gradient.explanation for gradient in comparison.gradients} == {expected}


def test_the_auxiliary_loss_of_transformers_is_that_of_the_tokens_of_a_rank() -> None:
    comparison = compare(case("mixtral", loss_and_aux_loss, fsdp_size=2))
    (aux_loss,) = (term for term in comparison.loss if not term.equal)
    assert aux_loss.name == "aux" and aux_loss.explanation.startswith("neither the sum nor the mean over ranks")
    assert comparison.first_wrong is not None
    assert comparison.first_wrong.name == "model.layers.1.mlp.gate.weight"
    assert comparison.first_wrong.explanation.startswith("mean of the gradients of each rank's batch alone")
