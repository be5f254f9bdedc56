"""Custom routers on several ranks, with every strategy: the routers of docs/how_to/router.md."""

from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import MoE, MoEConfig
from maxmoe.parallel import parallelize, parameter_shardings, token_sharding
from maxmoe.ranks.token_group import TokenReductions
from maxmoe.sharding import LogicalRules, Mesh
from parallel.dispatch.test_strategies import STRATEGIES
from support.dispatched_layer import NUM_EXPERTS, SIZES, check_part, make_batch, take_step
from support.documented_routers import ROUTERS, noisy
from support.named import named
from support.parallel_decoder import MeshRules
from support.run_ranks import run_ranks
from support.sampling import by_default

ALL = {**ROUTERS, "NoisyTopK": (lambda num_experts: 2, noisy)}
LAYOUTS = [
    MeshRules("ep-as-dp", {"expert": 2}),
    MeshRules("ep-as-dp", {"expert": 4}),
    MeshRules("ep-tp", {"data": 2, "expert": 2}),
    MeshRules("default", {"expert": 2, "tensor": 2}),
    MeshRules("cp-as-ep", {"context": 2, "expert": 2}),
]


def squared_share(
    probabilities: Tensor,
    tokens_per_expert: Tensor,
    top_k: int,
    *,
    lengths: Tensor | None,
    tokens: TokenReductions,
) -> Tensor:
    """The balance loss of docs/how_to/router.md."""
    num_sequences, length, num_experts = probabilities.shape
    num_tokens = num_sequences * length if lengths is None else lengths.sum()
    (mass,) = tokens.all_reduce_sequence(probabilities.sum((0, 1)))
    mass, num_tokens = tokens.all_reduce_batch(mass, *tokens.all_reduce_sequence(num_tokens))
    return num_experts * (mass / num_tokens).square().sum()


def quadratic(gate: Tensor | None, up: Tensor) -> Tensor:
    assert gate is not None
    return gate.sigmoid() * up.square()


def make(name: str, **replaced: Any) -> MoE:
    """A layer with the same random values at every call."""
    top_k, make_router = ALL[name]
    config = MoEConfig(**SIZES, top_k=top_k(NUM_EXPERTS), load_balance_loss_weight=0.3, num_shared_experts=1)
    layer = MoE(config, router=make_router(config), **replaced).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in layer.state_dict().values():
            value.copy_(0.5 * torch.randn(value.shape, generator=generator, dtype=torch.float64))
    return layer


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.filterwarnings("ignore:the rules shard sequences over .* declare nothing")
@pytest.mark.parametrize("layout", by_default(LAYOUTS, [LAYOUTS[0], LAYOUTS[-1]]), ids=str)
@pytest.mark.parametrize("turn", by_default(range(len(STRATEGIES)), [0]))
def test_equals_one_process(turn: int, layout: MeshRules) -> None:
    """Each router with another strategy in each layout and turn."""
    cases = {}
    for name in ALL:
        replaced = {"activation": quadratic, "balance_loss": squared_share} if name == "TopP" else {}
        batch = make_batch(make(name).config, "of the router")
        whole = make(name, **replaced)
        torch.manual_seed(7)  # for the noise of NoisyTopK, which every rank draws
        cases[name] = (replaced, batch, take_step(whole, batch))

    def check() -> None:
        mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
        for number, (name, (replaced, batch, expected)) in enumerate(cases.items(), start=LAYOUTS.index(layout)):
            if name == "ExpertChoice" and "context" in layout.sizes:
                with pytest.raises(ValueError, match="router needs whole sequences, sharded here over"):
                    parallelize(make(name), mesh, rules)
                continue
            dispatch = STRATEGIES[(number + turn) % len(STRATEGIES)]
            layer = make(name, **replaced)
            shardings = parameter_shardings(layer, mesh, rules)
            parallelize(layer, mesh, rules, dispatch=dispatch)
            part = token_sharding(mesh, rules).slices(batch.x.shape[:2])
            torch.manual_seed(7)
            with named(name, dispatch):
                check_part(take_step(layer, batch.part(part)), expected, part, shardings)

    run_ranks(check, layout.world_size)
