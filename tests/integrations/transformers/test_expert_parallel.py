"""Models of transformers with their own expert parallelism and our dispatch: losses and gradients of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers.distributed.expert_parallel")  # from 5.21 on

from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface, apply_expert_parallelism

from maxmoe.integrations.transformers.expert_parallel import LeastLoadedEP, RaggedAllToAllEP, RingOfExpertsEP
from support.moved_experts import moving_experts
from support.operator_calls import assert_near
from support.replaced_models import assert_same_gradients, summed_step
from support.run_ranks import run_cases
from support.small_models import blocks_of, import_models, model_of

import_models("mixtral", "gpt_oss")
IDS = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(1))
IMPLEMENTATIONS = {
    "maxmoe_ring_of_experts": RingOfExpertsEP,
    "maxmoe_ragged_all_to_all": RaggedAllToAllEP,
    "maxmoe_least_loaded": LeastLoadedEP,
    "all_to_all": AllToAllEP,  # of transformers, with our experts
}
CASES = [
    ("mixtral", "maxmoe_ring_of_experts"),
    ("mixtral", "maxmoe_least_loaded"),
    ("mixtral", "all_to_all"),
    ("gpt_oss", "maxmoe_ragged_all_to_all"),  # with biases
    ("gpt_oss", "maxmoe_least_loaded"),
    ("mixtral", "all_reduce"),  # of transformers
]


def model(preset: str) -> Any:
    """A small model with the same parameters at every call."""
    torch.manual_seed(0)
    built = model_of(preset, num_hidden_layers=2).double()
    for parameter in built.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    built.set_experts_implementation("maxmoe")
    return built


def test_ranks_equal_one_process() -> None:
    wholes = {preset: model(preset) for preset in ("mixtral", "gpt_oss")}
    losses = {preset: summed_step(whole, IDS) for preset, whole in wholes.items()}

    def other_tokens(preset: str, implementation: str) -> None:
        """Other tokens on every rank, as maxmoe needs them."""
        assert EPImplementationInterface()[implementation] is IMPLEMENTATIONS[implementation]
        ours = model(preset)
        config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation=implementation)
        meshes = ours.prepare_distribute_model(config)[2]
        plan = ours._resolve_parallel_plans(config)[1]
        apply_expert_parallelism(ours, meshes.get_mesh("ep"), meshes.get_mesh("tp"), plan, config.ep_implementation)
        (block, *_) = blocks_of(ours).values()
        assert block.experts.num_experts == 3 and block.experts.down_proj.to_local().shape[0] == 3
        with moving_experts(implementation == "maxmoe_least_loaded"):
            loss = summed_step(ours, IDS.chunk(2)[dist.get_rank()])
        dist.all_reduce(loss)
        assert_near(loss, losses[preset], 1e-12, "loss")
        for parameter in ours.parameters():
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
        assert_same_gradients(ours, wholes[preset], 1e-12)

    def same_tokens(preset: str, implementation: str) -> None:
        """The same tokens on every rank: experts of other ranks are masked, id num_local_experts, weight 0."""
        ours = model(preset)
        plan = ours._resolve_parallel_plans(DistributedConfig(fsdp_size=2, ep_size=2))[1]
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        apply_expert_parallelism(ours, mesh, mesh, plan, implementation)
        assert_near(summed_step(ours, IDS), losses[preset], 1e-12, "loss")
        assert_same_gradients(ours, wholes[preset], 1e-12)
        with pytest.raises(ValueError, match=r"^RingOfExpertsEP needs other tokens on every rank: tp_size=1, got 2$"):
            apply_expert_parallelism(model(preset), mesh, mesh, plan, "maxmoe_ring_of_experts")

    def check(preset: str, implementation: str) -> None:
        (same_tokens if implementation == "all_reduce" else other_tokens)(preset, implementation)

    run_cases(check, 2, CASES)
