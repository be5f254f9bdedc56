"""`compare_ranks` with FSDP2 and with the parallelism of transformers: docs/how_to/other_libraries.md."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from maxmoe.ranks.failures import RankError
from support.compared_models import Case
from support.forked_comparison import compare
from support.programs import printed, run
from support.small_models import import_models, model_of

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
SCRIPTS = Path(__file__).parent / "mistakes_of_others"
import_models("mixtral", "qwen3_moe", "gpt_oss")
IDS = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(1))
# FSDP2 of torch 2.13 divides twice in float64 and float16 if its group has one rank.
HALVED = "0.5 times: 1 / number of ranks"
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
    return token_loss(model(input_ids=ids, use_cache=False).logits, ids)


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss_and_aux_loss(model: Any, ids: Tensor) -> dict[str, Tensor]:
    output = model(input_ids=ids, use_cache=False, output_router_logits=True)
    return {"tokens": token_loss(output.logits, ids), "aux": output.aux_loss}


def case(preset: str, loss: Any = loss, **sizes: Any) -> Case:
    num_copies = sizes.get("tp_size", 1)
    return Case(
        partial(distribute, sizes),
        sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1) * num_copies,
        loss=loss,
        make_batch=partial(ids_of_rank, num_copies),
        build=partial(build, preset),
    )


@pytest.fixture(autouse=True)
def expert_parallelism() -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")  # from 5.21 on


EXPERTS_OF_TWO_RANKS = {"fsdp_size": 2, "ep_size": 2}
SIZES: list[dict[str, Any]] = [
    {"fsdp_size": 2},
    {"tp_size": 2},
    {"tp_size": 4},
    {"fsdp_size": 2, "tp_size": 2},
    {"dp_replicate_size": 2, "fsdp_size": 2},
    EXPERTS_OF_TWO_RANKS,
    {"fsdp_size": 4, "ep_size": 4},
    {"fsdp_size": 4, "ep_size": 2},
    {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
    {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
    {"tp_size": 4, "ep_size": 4, "ep_implementation": "all_reduce"},
    {"tp_size": 4, "ep_size": 4, "ep_implementation": "all_to_all"},
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
    {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
]


def is_halved_in_float64(sizes: dict[str, Any]) -> bool:
    """Whether FSDP2 of the experts has one rank."""
    fsdp_size, tp_size, ep_size = (sizes.get(name, 1) for name in ("fsdp_size", "tp_size", "ep_size"))
    return ep_size == fsdp_size * tp_size > tp_size


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("preset", EXPERTS)
def test_parallelism_of_transformers(preset: str, sizes: dict[str, Any]) -> None:
    if preset == "gpt_oss" and sizes.get("ep_implementation") == "all_reduce":
        with pytest.raises(RankError, match="Class values must be smaller than num_classes"):
            compare(case(preset, **sizes))
        return
    dtype = torch.float32 if is_halved_in_float64(sizes) else None
    compare(case(preset, **sizes), dtype=dtype).raise_if_different()


@pytest.mark.slow  # the next test finds the same without transformers
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


def test_the_auxiliary_loss_of_transformers_counts_the_tokens_of_each_rank_alone() -> None:
    comparison = compare(case("mixtral", loss_and_aux_loss, fsdp_size=2), dtype=torch.float64)
    (aux_loss,) = (term for term in comparison.loss if not term.equal)
    assert aux_loss.name == "aux" and aux_loss.explanation.startswith("neither the sum nor the mean over ranks")
    assert comparison.first_wrong is not None
    assert comparison.first_wrong.name == "model.layers.1.mlp.gate.weight"
    assert comparison.first_wrong.explanation.startswith("mean of the gradients of each rank's batch alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "last_line"),
    [
        ("divide_factor_of_fsdp2", "torch.float64 [0.25, 0.25, 0.25, 0.25] expected 0.5"),
        ("slots_of_gpt_oss", "GptOssExperts Class values must be smaller than num_classes."),
        ("zero_bubble_with_ddp", "ScheduleInterleavedZeroBubble different"),
    ],
)
def test_mistakes_of_others_without_this_library(script: str, last_line: str) -> None:
    output = printed(run([sys.executable, "-W", "ignore", str(SCRIPTS / f"{script}.py")]))
    assert output.splitlines()[-1] == last_line
