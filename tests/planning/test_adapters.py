"""Plans of models with adapters against real ranks: frozen weights have no gradient collectives."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from maxmoe import replay_routing
from maxmoe.parallel import parallelize
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.sharded_tokens import ShardedTokens
from maxmoe.planning import estimate
from maxmoe.sharding import LogicalRules, Mesh, NamedSharding
from support.counted_collectives import CountedCollectives
from support.measured_step import PRESET_LAYOUTS, balanced_routing, by_kind_and_axis
from support.parallel_decoder import BATCH, LENGTH, MeshRules, batch, decoder, loss, token_spec
from support.run_ranks import run_ranks

TARGETS = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]


def adapted() -> Any:
    """Experts with adapters, and a trained embedding, so that the backward passes through all modules."""
    options: Any = {"target_modules": [], "target_parameters": TARGETS}
    model = get_peft_model(decoder(), LoraConfig(r=3, **options)).to(torch.float64)
    model.base_model.model.embedding.weight.requires_grad_(True)
    return model.base_model.model


def step(layout: MeshRules, dispatch: Dispatch) -> tuple[dict[Any, list[int]], int]:
    """The collectives of a step, and the bytes of the parameters of a rank."""
    mesh = Mesh(layout.sizes)
    model: nn.Module = parallelize(adapted(), mesh, layout.rules, dispatch=dispatch)
    part = NamedSharding(mesh, token_spec(mesh, LogicalRules.load(layout.rules))).slices((BATCH, LENGTH))
    tokens, targets = (whole[part].clone() for whole in batch())
    with replay_routing(model, balanced_routing(model, tokens.shape)), CountedCollectives(mesh) as counted:
        loss(model(tokens), targets).backward()
    return dict(counted.counts), sum(parameter.to_local().nbytes for parameter in model.parameters())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dispatch", ["ring_of_experts", "ragged_all_to_all"])
@pytest.mark.parametrize("layout", PRESET_LAYOUTS, ids=str)
def test_a_step_is_what_torch_runs(layout: MeshRules, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh.planned(layout.sizes)
    planned = estimate(
        adapted(), mesh, layout.rules, batch_size=BATCH, sequence_length=LENGTH, dispatch=dispatch, allow_unused=True
    )
    expected = by_kind_and_axis(*planned.traffic)
    monkeypatch.setattr(ShardedTokens, "_all_reduce", lambda tokens, summand, axes: summand)
    for collectives, num_bytes in run_ranks(step, layout.world_size, layout, dispatch):
        assert collectives == expected
        assert num_bytes == planned.memory["parameters"]
