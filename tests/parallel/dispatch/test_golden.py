"""MaxText's numbers of bounded buffers on four ranks, in its two strategies.

Tolerance as in tests/reference/test_maxtext.py.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from maxmoe import MoE, MoEConfig
from maxmoe.parallel import parallelize, parameter_shardings, token_sharding
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import LogicalRules, Mesh
from support import golden_fixtures
from support.dispatched_layer import Batch, check_same, take_step
from support.parts import part_by_definition
from support.run_ranks import run_ranks

TOLERANCE = 2e-5


@dataclass(frozen=True)
class Fixture:
    """MaxText's layer, and its results for a batch; gradients without its balance loss."""

    config: MoEConfig
    parameters: dict[str, Tensor]
    batch: Batch
    output: Tensor
    gradients: dict[str, Tensor]
    chosen: Tensor


def fixture(name: str) -> Fixture:
    arrays, meta = golden_fixtures.load(name)
    config = golden_fixtures.layer_config(arrays, meta)
    parameters = golden_fixtures.layer_parameters(arrays, config)
    expected = golden_fixtures.expected_gradients(arrays, config)
    leaves = {key: (arrays["x"] if key == "x" else parameters[key]).clone().requires_grad_() for key in expected}
    balance_loss = golden_fixtures.balance_loss(leaves["x"], {**parameters, **leaves}, arrays, meta)
    if balance_loss.requires_grad:
        balance_loss.backward()
    gradients = {
        key: value if leaves[key].grad is None else value - leaves[key].grad for key, value in expected.items()
    }
    batch = Batch(arrays["x"], arrays["cotangent"])
    return Fixture(
        config, parameters, batch, golden_fixtures.expected_output(arrays), gradients, arrays["topk_indices"]
    )


def check(fixture: Fixture, dispatch: Dispatch) -> int:
    """Compare this rank's part, and return the number of dropped slots."""
    mesh, rules = Mesh({"expert": 4}), LogicalRules.load("ep-as-dp")
    layer = MoE(fixture.config)
    layer.load_state_dict(fixture.parameters)
    shardings = parameter_shardings(layer, mesh, rules)
    parallelize(layer, mesh, rules, dispatch=dispatch)
    part = token_sharding(mesh, rules).slices(fixture.batch.x.shape[:2])
    got = take_step(layer, fixture.batch.part(part))
    check_same(got.hidden_states, fixture.output, fixture.output[part], "hidden_states", TOLERANCE)
    for name, whole in fixture.gradients.items():
        gradient = got.gradients[name]
        if name == "x":
            cut = whole[part]
        else:
            gradient, cut = gradient.to_local(), part_by_definition(whole, shardings[name].sharding.spec, mesh)
        check_same(gradient, whole, cut, f"{dispatch}: gradient of {name}", TOLERANCE)
    assert got.gradients.keys() >= fixture.gradients.keys()
    return int(got.stats.dropped)


def slots_by_rank(whole: Fixture) -> Tensor:
    """Number of slots from each of four ranks (first dim) to the experts of each rank."""
    num_experts = whole.config.num_experts
    counts = torch.nn.functional.one_hot(whole.chosen.flatten(1), num_experts).sum(1)
    return counts.view(4, -1, 4, num_experts // 4).sum((1, 3))


@pytest.mark.parametrize(
    ("name", "dispatch"),
    [("ep4_ring_raggedsort_trunc_drop", "ring_of_experts"), ("ep4_ra2a_trunc_drop", "ragged_all_to_all")],
)
def test_a_bounded_buffer_drops_the_slots_that_maxtext_drops(name: str, dispatch: Dispatch) -> None:
    """The output of a token without any kept slot is zero; the drops are counted on all ranks."""
    whole = fixture(name)
    assert whole.config.buffer_factor == 1.0
    of_rank = slots_by_rank(whole).sum(0)
    expected = int((of_rank - of_rank.sum() // 4).clamp_min(0).sum())
    assert expected > 0 and whole.output.eq(0).all(-1).any()
    assert run_ranks(lambda: check(whole, dispatch), 4) == [expected] * 4
