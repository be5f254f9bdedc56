"""Routing recorded and replayed on a mesh: each rank's record contains its tokens."""

import itertools

import torch
from torch import Tensor

import maxmoe
from maxmoe import MoE, MoEConfig, parallelize
from maxmoe.parallel import token_group, token_sharding
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import Mesh
from support.parallel_decoder import MeshRules
from support.parts import assert_same
from support.run_ranks import run_cases

CONFIG = MoEConfig(hidden_size=8, intermediate_size=4, num_experts=4, top_k=2, load_balance_loss_weight=0.1)
LAYOUTS: list[tuple[MeshRules, Dispatch]] = [
    (MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2}), "ring_of_experts"),
    (MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2}), "ragged_all_to_all"),
    (MeshRules("ep-tp", {"data": 2, "expert": 2}), "auto"),
]
STRATEGIES: tuple[Dispatch, ...] = ("ring_of_experts", "ragged_all_to_all")
SHAPE = (4, 6)


def layer(seed: int) -> MoE:
    torch.manual_seed(seed)
    return MoE(CONFIG, dtype=torch.float64)


def loss_of(model: torch.nn.Module, x: Tensor, **options) -> Tensor:
    output = model(x)
    return maxmoe.mean_over_tokens(output.hidden_states.square().sum(-1), **options) + output.aux_loss


def test_gradients_are_those_of_one_process_with_the_same_record() -> None:
    x = torch.randn(*SHAPE, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    before, whole = layer(0), layer(1)
    with maxmoe.record_routing(before) as record:
        before(x)
    with maxmoe.replay_routing(whole, record):
        expected = loss_of(whole, x)
    expected.backward()

    def check(layout: MeshRules, dispatch: Dispatch) -> None:
        mesh = Mesh(layout.sizes)
        part = token_sharding(mesh, layout.rules).slices(SHAPE)
        ours_before = parallelize(layer(0), mesh, layout.rules, dispatch=dispatch)
        with maxmoe.record_routing(ours_before) as own:
            ours_before(x[part])
        assert torch.equal(own.calls[""][0], record.calls[""][0][part])
        ours = parallelize(layer(1), mesh, layout.rules, dispatch=dispatch)
        with maxmoe.replay_routing(ours, own):
            loss = loss_of(ours, x[part], tokens=token_group(mesh, layout.rules))
        loss.backward()
        assert_same(loss, expected)
        for name, parameter in whole.named_parameters():
            assert_same(ours.get_parameter(name).grad.full_tensor(), parameter.grad, name)

    run_cases(check, 4, LAYOUTS)


def test_a_rank_without_tokens() -> None:
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with maxmoe.record_routing(whole := layer(0)) as expected:
        whole(x)

    def check(dispatch: Dispatch, shape: tuple[int, int]) -> None:
        mesh = Mesh({"expert": 2})
        own_x = x.new_zeros(*shape, 8) if torch.distributed.get_rank() else x
        with maxmoe.record_routing(before := parallelize(layer(0), mesh, "ep-as-dp", dispatch=dispatch)) as record:
            before(own_x)
        (ids,) = record.calls[""]
        assert ids.shape == (*own_x.shape[:-1], CONFIG.top_k)
        assert not ids.numel() or ids.equal(expected.calls[""][0])
        after = parallelize(layer(1), mesh, "ep-as-dp", dispatch=dispatch)
        with maxmoe.record_routing(after) as again, maxmoe.replay_routing(after, record):
            loss_of(after, own_x, tokens=token_group(mesh, "ep-as-dp")).backward()
        assert again.calls[""][0].equal(ids)

    run_cases(check, 2, itertools.product(STRATEGIES, ((0, 6), (2, 0))))
