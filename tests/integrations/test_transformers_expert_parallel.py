"""Models of transformers on several ranks: their own expert parallelism with our dispatch, and our layers in them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers.distributed.expert_parallel")  # from 5.21 on

from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface, apply_expert_parallelism

from maxmoe import parallelize
from maxmoe.integrations.transformers import replace_moe_blocks
from maxmoe.integrations.transformers.expert_parallel import LeastLoadedEP, RaggedAllToAllEP, RingOfExpertsEP
from maxmoe.parallel import token_sharding
from maxmoe.sharding import Mesh
from support.moved_experts import moving_experts
from support.parts import assert_same
from support.run_ranks import run_ranks
from support.small_models import blocks_of, import_models, model_of

import_models("mixtral", "gpt_oss", "qwen3_moe")
IDS = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(1))
OURS = {
    "maxmoe_ring_of_experts": RingOfExpertsEP,
    "maxmoe_ragged_all_to_all": RaggedAllToAllEP,
    "maxmoe_least_loaded": LeastLoadedEP,
}


def model(preset: str) -> Any:
    """A small model with the same parameters at every call."""
    torch.manual_seed(0)
    built = model_of(preset, num_hidden_layers=2).double()
    for parameter in built.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    built.set_experts_implementation("maxmoe")
    return built


def step(module: nn.Module, ids: Tensor) -> Tensor:
    """The sum of the losses of the tokens; one backward."""
    logits = module(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    loss.backward()
    return loss.detach()


def check_gradients(module: nn.Module, whole: nn.Module) -> None:
    """Compare gradients with one process's, as full tensors if they are DTensors."""
    for name, parameter in whole.named_parameters():
        gradient = module.get_parameter(name).grad
        assert_same(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient, parameter.grad, name)


@pytest.mark.parametrize(
    ("preset", "implementation"),
    [
        ("mixtral", "maxmoe_ring_of_experts"),
        ("gpt_oss", "maxmoe_ragged_all_to_all"),
        ("gpt_oss", "maxmoe_least_loaded"),
        ("mixtral", "maxmoe_least_loaded"),
        ("mixtral", "all_to_all"),
        pytest.param("gpt_oss", "maxmoe_ring_of_experts", marks=pytest.mark.slow),
        pytest.param("mixtral", "maxmoe_ragged_all_to_all", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "all_to_all", marks=pytest.mark.slow),
    ],
)
def test_other_tokens_on_every_rank(preset: str, implementation: str) -> None:
    assert EPImplementationInterface()[implementation] is OURS.get(implementation, AllToAllEP)
    whole = model(preset)
    expected = step(whole, IDS)

    def check() -> None:
        ours = model(preset)
        config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation=implementation)
        meshes = ours.prepare_distribute_model(config)[2]
        plan = ours._resolve_parallel_plans(config)[1]
        apply_expert_parallelism(ours, meshes.get_mesh("ep"), meshes.get_mesh("tp"), plan, config.ep_implementation)
        (block, *_) = blocks_of(ours).values()
        assert block.experts.num_experts == 3 and block.experts.down_proj.to_local().shape[0] == 3
        with moving_experts(implementation == "maxmoe_least_loaded"):
            loss = step(ours, IDS.chunk(2)[dist.get_rank()])
        dist.all_reduce(loss)
        assert_same(loss, expected)
        for parameter in ours.parameters():
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
        check_gradients(ours, whole)

    run_ranks(check, 2)


def test_the_same_tokens_on_every_rank() -> None:
    """Experts of other ranks are masked: id num_local_experts, weight 0. maxmoe needs different tokens per rank."""
    whole = model("mixtral")
    expected = step(whole, IDS)

    def check() -> None:
        ours = model("mixtral")
        plan = ours._resolve_parallel_plans(DistributedConfig(fsdp_size=2, ep_size=2))[1]
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        apply_expert_parallelism(ours, mesh, mesh, plan, "all_reduce")
        assert_same(step(ours, IDS), expected)
        check_gradients(ours, whole)
        with pytest.raises(ValueError, match=r"^RingOfExpertsEP needs other tokens on every rank: tp_size=1, got 2$"):
            apply_expert_parallelism(model("mixtral"), mesh, mesh, plan, "maxmoe_ring_of_experts")

    run_ranks(check, 2)


def with_our_layers(preset: str) -> nn.Module:
    """The model with layers of maxmoe in the place of its sparse blocks."""
    built = model(preset)
    replace_moe_blocks(built)
    return built


@pytest.mark.filterwarnings("ignore:.* of the parameters are whole on every rank along fsdp")
@pytest.mark.parametrize(
    ("preset", "sizes"),
    [
        ("mixtral", {"fsdp": 2, "expert": 2}),
        # As test_replaced_meshes.py.
        pytest.param("qwen3_moe", {"expert": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"expert": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"fsdp": 2, "expert": 2}, marks=pytest.mark.slow),
    ],
)
def test_our_layers_in_their_models(preset: str, sizes: dict[str, int]) -> None:
    """Modules that declare no names are replicated; losses and all gradients equal one process's."""
    whole = with_our_layers(preset)
    expected = step(whole, IDS)

    def check() -> None:
        for dispatch in ("ring_of_experts", "ragged_all_to_all"):
            mesh = Mesh(sizes)
            ours = parallelize(with_our_layers(preset), mesh, "ep-as-dp", dispatch=dispatch)
            loss = step(ours, IDS[token_sharding(mesh, "ep-as-dp").slices(IDS.shape)])
            dist.all_reduce(loss)
            assert_same(loss, expected)
            check_gradients(ours, whole)

    run_ranks(check, Mesh.planned(sizes).num_ranks)
