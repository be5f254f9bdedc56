"""MaxText's numbers on four ranks, in every strategy; its bounded buffers; its tables of splits and offsets.

Tolerance as in tests/reference/test_maxtext.py.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import MoE, MoEConfig
from maxmoe.parallel import parallelize, parameter_shardings, token_sharding
from maxmoe.parallel.dispatch.ragged_dispatcher import splits_of
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import LogicalRules, Mesh
from support import golden_fixtures
from support.dispatched_layer import Batch, check_same, take_step
from support.parallel_decoder import MeshRules
from support.parts import part_by_definition
from support.run_ranks import run_ranks

TOLERANCE = 2e-5
FAMILIES = ("mixtral_sparse", "deepseek3", "gpt_oss_sparse", "llama4_sparse")
EXPERTS = MeshRules("ep-as-dp", {"expert": 4})
LAYOUTS = [
    EXPERTS,
    MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2}),
    MeshRules("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2}),
    MeshRules("pure-fsdp", {"fsdp": 4}),
    MeshRules("ep-tp", {"expert": 4}),
]


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


def check(fixture: Fixture, layout: MeshRules, dispatch: Dispatch, **options: Any) -> int:
    """Compare this rank's part, and return the number of dropped slots."""
    mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
    layer = MoE(fixture.config)
    layer.load_state_dict(fixture.parameters)
    shardings = parameter_shardings(layer, mesh, rules)
    parallelize(layer, mesh, rules, dispatch=dispatch, **options)
    part = token_sharding(mesh, rules).slices(fixture.batch.x.shape[:2])
    got = take_step(layer, fixture.batch.part(part))
    check_same(got.hidden_states, fixture.output, fixture.output[part], "hidden_states", TOLERANCE)
    for name, whole in fixture.gradients.items():
        gradient = got.gradients[name]
        if name == "x":
            cut = whole[part]
        else:
            gradient, cut = gradient.to_local(), part_by_definition(whole, shardings[name].sharding.spec, mesh)
        check_same(gradient, whole, cut, f"{dispatch} on {layout}: gradient of {name}", TOLERANCE)
    assert got.gradients.keys() >= fixture.gradients.keys()
    return int(got.stats.dropped)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dispatch", ["ring_of_experts", "ragged_all_to_all"])
def test_families_on_four_ranks(dispatch: Dispatch, name: str) -> None:
    whole = fixture(name)

    def check_all() -> None:
        for layout in LAYOUTS:
            assert check(whole, layout, dispatch) == 0
        if dispatch == "ring_of_experts":
            assert check(whole, EXPERTS, dispatch, num_chunks=2) == 0

    run_ranks(check_all, 4)


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
    assert run_ranks(lambda: check(whole, EXPERTS, dispatch), 4) == [expected] * 4


def offsets(sizes: list[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


@pytest.mark.parametrize(("kind", "bounded"), [("plain", False), ("trunc", True)])
def test_splits_and_offsets_are_maxtexts(kind: str, bounded: bool) -> None:
    """Row s of each table is computed by rank s; `output_offsets` are offsets in the receivers' buffers."""
    arrays, meta = golden_fixtures.load("a2a_params")
    max_rows = meta["buffer"] if bounded else None
    splits = [splits_of(arrays["matrix"], rank, max_rows) for rank in range(meta["ep"])]
    routed, send, receive = ([list(split[field]) for split in splits] for field in range(3))
    of_routed, of_receive = (torch.tensor([offsets(sizes) for sizes in lists]) for lists in (routed, receive))
    tables = {
        "dispatch_input_offsets": of_routed,
        "dispatch_send_sizes": torch.tensor(send),
        "dispatch_output_offsets": of_receive.t(),
        "dispatch_recv_sizes": torch.tensor(receive),
        "combine_input_offsets": of_receive,
        "combine_send_sizes": torch.tensor(receive),
        "combine_output_offsets": of_routed.t(),
        "combine_recv_sizes": torch.tensor(send),
    }
    for name, table in tables.items():
        assert table.equal(arrays[f"{kind}_{name}"]), (
            f"{name}: {table.tolist()}, not {arrays[f'{kind}_{name}'].tolist()}"
        )
    if bounded:
        assert torch.tensor(send).equal(arrays["truncated_matrix"])
        assert torch.tensor(receive).sum(1).max() == max_rows
