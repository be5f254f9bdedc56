"""Recomputation by name on a mesh: the bits of a step without it. `test_estimate.py` counts the collectives."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import MoEConfig
from maxmoe.parallel import parallelize
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import CONFIG, MOE, MeshRules, batch, decoder, loss, token_spec
from support.parts import part_by_definition
from support.run_ranks import run_ranks

PARTS = {"attention", "dispatch", "experts", "feed_forward", "norms", "shared_experts"}
SCALED_INPUT = replace(MOE, apply_weights_to="input", num_shared_experts=0, shared_expert_gate=False)
DENSE = replace(MOE, implementation="dense")
RING, RAGGED = {"dispatch": "ring_of_experts"}, {"dispatch": "ragged_all_to_all"}


def step(layer: MoEConfig, layout: MeshRules, **options: Any) -> list[Tensor]:
    """Logits and gradients of a rank."""
    mesh = Mesh(layout.sizes)
    model: Any = parallelize(decoder(replace(CONFIG, moe=layer)), mesh, layout.rules, **options)
    spec = token_spec(mesh, LogicalRules.load(layout.rules))
    tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
    output = model(tokens)
    loss(output, targets).backward()
    return [output.logits, *(parameter.grad.to_local() for parameter in model.parameters())]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        (
            MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2}),
            [(MOE, RING), (SCALED_INPUT, RAGGED), (DENSE, RING), (replace(DENSE, capacity_factor=1.5), RING)],
        ),
        (MeshRules("cp-as-ep", {"context": 2, "expert": 2}), [(MOE, {**RAGGED, "num_chunks": 2})]),
        (MeshRules("ep-tp", {"expert": 2}), [(MOE, RING), (MOE, RAGGED)]),
        (MeshRules("default", {"fsdp": 2, "tensor": 2}), [(MOE, {})]),
    ],
    ids=str,
)
def test_the_same_bits(layout: MeshRules, cases: list[tuple[MoEConfig, dict[str, Any]]]) -> None:
    def check() -> None:
        for layer, options in cases:
            names = PARTS - ({"shared_experts"} if not layer.num_shared_experts else set())
            expected, got = (step(layer, layout, **options, recompute=recompute) for recompute in ((), names))
            assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True)), (layer, options)

    run_ranks(check, layout.world_size)


def test_ranks_that_recompute_other_parts() -> None:
    def check() -> None:
        names = ("experts", "attention")[torch.distributed.get_rank()]
        with pytest.raises(ValueError, match="recompute"):
            parallelize(decoder(), Mesh({"expert": 2}), "ep-as-dp", recompute=(names,))
        with pytest.raises(ValueError, match="got 'atention'; the nearest are 'attention'"):
            parallelize(decoder(), Mesh({"expert": 2}), "ep-as-dp", recompute=("atention",))

    run_ranks(check, 2)
