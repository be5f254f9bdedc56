"""Mistakes of other libraries with experts on other ranks, one test each.

Others are where they belong: padding and numbers of sequences in test_strategies.py; checkpoints between meshes in
tests/parallel/test_distributed_checkpoint.py; losses of unequal micro-batches in tests/parallel/test_token_losses.py;
the norm over mixed meshes in tests/parallel/test_clip_grad_norm.py; ranks that disagree in test_agreement.py there.
"""

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import maxmoe
from maxmoe import MoE, MoEConfig
from maxmoe.parallel import clip_grad_norm_, parallelize, token_group, token_sharding
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import Mesh
from support.dispatched_layer import make_batch, make_layer, take_step
from support.named import named
from support.parallel_decoder import MeshRules
from support.parts import assert_same
from support.run_ranks import run_ranks

CONFIG = MoEConfig(hidden_size=8, intermediate_size=4, num_experts=8, top_k=2, score_correction_bias=True)
BATCH = make_batch(CONFIG, "of the router", (4, 4))
TRAVELLING = MeshRules("ep-as-dp", {"expert": 4})
REPLICATED = MeshRules("ep-tp", {"data": 2, "expert": 2})
MIXED = MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2})
STRATEGIES: tuple[Dispatch, ...] = ("ring_of_experts", "ragged_all_to_all")


def on_meshes(
    layouts: Iterable[MeshRules], check: Callable[[Mesh, Any, tuple[slice, ...]], Any], model: nn.Module
) -> list[list[Any]]:
    """Call `check` with the mesh, a model on it, and which of the tokens are this rank's.

    On each mesh with one of the strategies in turn, on a single mesh with both. Returns the results of all ranks, for
    one case after the other.
    """
    cases = list(zip(layouts, itertools.cycle(STRATEGIES), strict=False))
    cases = cases if len(cases) > 1 else [(cases[0][0], dispatch) for dispatch in STRATEGIES]

    def run() -> list[Any]:
        results = []
        for layout, dispatch in cases:
            with named(layout, dispatch):
                mesh = Mesh(layout.sizes)
                part = token_sharding(mesh, layout.rules).slices(BATCH.x.shape[:2])
                on_mesh = parallelize(copy.deepcopy(model), mesh, layout.rules, dispatch=dispatch)
                results.append(check(mesh, on_mesh, part))
        return results

    return list(map(list, zip(*run_ranks(run, 4), strict=True)))


def test_expert_gradients_are_not_multiplied_by_the_ranks() -> None:
    """Experts compute tokens of all ranks, the router one rank's: both get the gradient of the mean over all tokens."""
    whole = make_layer(CONFIG)
    maxmoe.mean_over_tokens(whole(BATCH.x).hidden_states.square().sum(-1)).backward()

    def check(mesh: Mesh, layer: Any, part: tuple[slice, ...]) -> None:
        losses = layer(BATCH.x[part]).hidden_states.square().sum(-1)
        maxmoe.mean_over_tokens(losses, tokens=token_group(mesh, MIXED.rules)).backward()
        for name, parameter in layer.named_parameters():
            assert_same(parameter.grad.full_tensor(), whole.get_parameter(name).grad, name)

    on_meshes([MIXED], check, make_layer(CONFIG))


def test_the_router_learns_from_the_outputs_of_experts_elsewhere() -> None:
    """The layer has no auxiliary loss, and each token's experts are on other ranks than the token."""
    expected = take_step(make_layer(CONFIG), BATCH).gradients["router.weight"]
    assert expected.abs().min() > 0

    def check(_mesh: Mesh, layer: Any, part: tuple[slice, ...]) -> None:
        take_step(layer, BATCH.part(part))
        assert_same(layer.router.weight.grad.full_tensor(), expected)

    on_meshes([TRAVELLING, REPLICATED], check, make_layer(CONFIG))


class Below(nn.Module):
    """A module of a user whose output is the input of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(8, 8, dtype=torch.float64)
        nn.init.eye_(self.below.weight)
        self.layer = make_layer(CONFIG)

    def forward(self, x: Tensor) -> Tensor:
        hidden_states: Tensor = self.layer(self.below(x)).hidden_states
        return hidden_states


@pytest.mark.filterwarnings("ignore:.*logical name")
def test_gradients_below_the_experts_are_reduced() -> None:
    torch.manual_seed(0)
    whole = Below()
    (whole(BATCH.x) * BATCH.cotangent).sum().backward()

    def check(_mesh: Mesh, model: Any, part: tuple[slice, ...]) -> None:
        (model(BATCH.x[part]) * BATCH.cotangent[part]).sum().backward()
        for name in ("weight", "bias"):
            gradient = model.below.get_parameter(name).grad.full_tensor()
            assert_same(gradient, whole.below.get_parameter(name).grad, name)

    torch.manual_seed(0)
    on_meshes([TRAVELLING, REPLICATED, MIXED], check, Below())


def test_every_weight_meets_its_expert_once() -> None:
    """Experts return their row of the identity, their output bias: a token's output is the weights of its experts."""
    layer = make_layer(replace(CONFIG, expert_bias=True, normalization="none"))
    with torch.no_grad():
        layer.experts.down_proj.zero_()
        layer.experts.down_bias.copy_(torch.eye(8))
    routing = layer.router(BATCH.x.flatten(0, 1))
    expected = torch.zeros(16, 8, dtype=torch.float64).scatter(1, routing.experts, routing.weights.detach())

    def check(_mesh: Mesh, ours: Any, part: tuple[slice, ...]) -> None:
        assert_same(ours(BATCH.x[part]).hidden_states, expected.view(4, 4, 8)[part])

    default = MeshRules("default", {"expert": 2, "tensor": 2})
    cp_as_ep = MeshRules("cp-as-ep", {"expert": 2, "context": 2})
    on_meshes([TRAVELLING, REPLICATED, default, cp_as_ep], check, layer)


def test_the_norm_for_clipping_does_not_depend_on_the_expert_axis() -> None:
    """The experts are DTensors; as plain tensors of each rank they would have other norms on other ranks."""
    whole = make_layer(CONFIG)
    take_step(whole, BATCH)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)

    def check(_mesh: Mesh, layer: Any, part: tuple[slice, ...]) -> Tensor:
        take_step(layer, BATCH.part(part))
        assert all(isinstance(parameter.grad, DTensor) for parameter in layer.parameters())
        return clip_grad_norm_(layer.parameters(), 0.1)

    for norms in on_meshes([TRAVELLING, REPLICATED, MIXED], check, make_layer(CONFIG)):
        for norm in norms:
            assert_same(norm, expected)


def test_experts_without_tokens_have_gradients_and_optimizer_states() -> None:
    batch = make_batch(CONFIG, "all to one expert", (4, 4))

    def check(_mesh: Mesh, layer: Any, part: tuple[slice, ...]) -> list[str]:
        take_step(layer, batch.part(part))
        optimizer = torch.optim.AdamW(layer.parameters())
        optimizer.step()
        gradients = [parameter.grad.to_local() for parameter in layer.experts.parameters()]
        assert all(gradient.any() == (dist.get_rank() == 0) for gradient in gradients)  # the gradient of expert 1
        return [name for name, parameter in layer.named_parameters() if "exp_avg" in optimizer.state[parameter]]

    for names in on_meshes([TRAVELLING], check, make_layer(CONFIG)):
        assert names == [[name for name, _ in make_layer(CONFIG).named_parameters()]] * 4


def test_ranks_have_their_own_batches() -> None:
    """Other tokens on rank 1 change its outputs, and no bit of the outputs of other ranks."""

    def check(_mesh: Mesh, layer: Any, part: tuple[slice, ...]) -> bool:
        x = BATCH.x[part]
        before = layer(x).hidden_states
        return bool(layer(-x if dist.get_rank() == 1 else x).hidden_states.equal(before))

    assert on_meshes([TRAVELLING], check, make_layer(CONFIG)) == [[True, False, True, True]] * len(STRATEGIES)


def test_a_state_dict_has_the_experts_of_all_ranks() -> None:
    expected = make_layer(CONFIG).state_dict()

    def check(_mesh: Mesh, layer: Any, _part: tuple[slice, ...]) -> None:
        state = layer.state_dict()
        assert list(state) == list(expected)
        for name, value in state.items():
            assert value.shape == expected[name].shape, name
            assert_same(getattr(value, "full_tensor", lambda value=value: value)(), expected[name], name)

    on_meshes([TRAVELLING], check, make_layer(CONFIG))


def test_evaluation_counts_nothing_towards_the_correction_bias() -> None:
    config = replace(CONFIG, correction_bias_update_rate=0.5)
    whole = make_layer(config)
    expected = take_step(whole, BATCH).stats.tokens_per_expert
    whole.update_correction_bias(expected)

    def check(_mesh: Mesh, layer: Any, part: tuple[slice, ...]) -> None:
        accumulator = maxmoe.StatsAccumulator(layer)
        with torch.no_grad():
            layer(-BATCH.x[part])
        take_step(layer, BATCH.part(part))
        layer(-BATCH.x[part])
        step = accumulator.update()
        assert step.layers["moe"].tokens_per_expert.equal(expected)
        assert_same(layer.router.score_correction_bias, whole.router.score_correction_bias)

    on_meshes([TRAVELLING], check, make_layer(config))


def test_the_auxiliary_loss_is_divided_by_no_ranks() -> None:
    """The value and the gradient of the auxiliary loss alone."""
    config = replace(CONFIG, load_balance_loss_weight=0.3, router_z_loss_weight=0.1)
    whole, alone = make_layer(config), replace(BATCH, cotangent=torch.zeros_like(BATCH.cotangent))
    expected = take_step(whole, alone)

    def check(_mesh: Mesh, layer: MoE, part: tuple[slice, ...]) -> None:
        got = take_step(layer, alone.part(part))
        assert_same(got.aux_loss, expected.aux_loss)
        gradient: Any = got.gradients["router.weight"]
        assert_same(gradient.full_tensor(), expected.gradients["router.weight"])

    on_meshes([TRAVELLING, REPLICATED, MIXED], check, make_layer(config))


def test_ranks_with_sequences_of_other_lengths_do_not_hang() -> None:
    """No token on rank 0, one token on rank 1; sequences are not padded to the longest."""
    whole, lengths = make_layer(CONFIG), (0, 1, 7, 3)
    tokens = BATCH.x.flatten(0, 1)[:11].split(lengths)

    def check(_mesh: Mesh, layer: Any, _part: tuple[slice, ...]) -> int:
        mine = tokens[dist.get_rank()]
        rows: list[int] = []
        layer.experts.register_forward_pre_hook(lambda _, arguments: rows.append(int(arguments[2].group_sizes.sum())))
        output = layer(mine)
        output.hidden_states.sum().backward()
        assert_same(output.hidden_states, whole(mine).hidden_states, scale=1.0)
        return rows[0]

    for rows in on_meshes([TRAVELLING], check, make_layer(CONFIG)):
        assert sum(rows) == sum(lengths) * CONFIG.top_k
