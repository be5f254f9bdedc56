"""Experts that move to ranks with few rows: bounds on rows and memory, errors. test_strategies.py compares numbers."""

import re
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import maxmoe
from maxmoe import MoE
from maxmoe.parallel import parallelize, token_sharding
from maxmoe.parallel.dispatch import least_loaded
from maxmoe.parallel.dispatch.lent_experts import LentExperts
from maxmoe.sharding import LogicalRules, Mesh
from support.dispatched_layer import FAMILIES, LOADS, NUM_EXPERTS, Batch, make_batch, make_layer, take_step
from support.measured_step import kept_tensors, num_bytes
from support.moved_experts import free_moves
from support.run_ranks import fake_rank, run_ranks
from support.slow_cases import by_default

EP = LogicalRules.load("ep-as-dp")
HOT = "three quarters to one expert"


@dataclass
class Computed:
    """Rows and foreign experts that a rank computes in a step; -1 foreign experts if no expert moves."""

    own: int
    foreign: int = 0
    num_foreign: int = -1


def spy(layer: MoE) -> list[Computed]:
    """Return a list that collects the rows of the rank in each forward of the experts."""
    computed: list[Computed] = []

    def note(_: object, arguments: tuple[Any, ...]) -> None:
        _, _, plan, *foreign = arguments
        computed.append(Computed(len(plan.slots)))
        for lent in foreign:
            assert isinstance(lent, LentExperts)
            computed[-1] = Computed(len(plan.slots), len(lent.plan.slots), sum(lent.receive))

    layer.experts.register_forward_pre_hook(note)
    return computed


def part_of(batch: Batch, mesh: Mesh) -> Batch:
    return batch.part(token_sharding(mesh, EP).slices(batch.x.shape[:2]))


@pytest.mark.parametrize("num_ranks", by_default([2, 4, 8], [4]))
def test_no_rank_computes_many_more_rows_than_the_mean(num_ranks: int) -> None:
    """At most 1.15 times the mean, for loads from even to all tokens on one expert."""
    names = ("mixtral", "longcat_flash")  # all slots are rows, or some select experts that compute nothing
    batches = {(name, load): make_batch(FAMILIES[name], load) for name in names for load in LOADS}

    def check() -> dict[tuple[str, str], tuple[Computed, list[int]]]:
        mesh, found = Mesh({"expert": num_ranks}), {}
        for (name, load), batch in batches.items():
            layer = parallelize(make_layer(FAMILIES[name]), mesh, EP, dispatch="least_loaded")
            computed = spy(layer)
            with free_moves():
                stats = take_step(layer, part_of(batch, mesh)).stats
            (of_step,) = computed
            found[name, load] = of_step, stats.tokens_per_expert[:NUM_EXPERTS].view(num_ranks, -1).sum(1).tolist()
        return found

    by_rank = run_ranks(check, num_ranks)
    for case in batches:
        computed, routed = [found[case][0] for found in by_rank], by_rank[0][case][1]
        rows = [rank.own + rank.foreign for rank in computed]
        assert sum(rows) == sum(routed)
        bound = max(-(-sum(rows) // num_ranks), 1.15 * sum(rows) / num_ranks)
        assert max(rows) <= bound, (case, computed)
        is_moved = max(rank.num_foreign for rank in computed) > 0
        assert is_moved == (max(routed) > bound), (case, computed)
        assert is_moved or rows == routed
        # The bound of test_expert_moves.py.
        assert max(rank.num_foreign for rank in computed) <= NUM_EXPERTS // num_ranks + num_ranks - 1


def kept_bytes(layer: MoE, batch: Batch) -> int:
    """Bytes that autograd keeps for the backward, without parameters."""
    stored = [getattr(parameter, "_local_tensor", parameter) for parameter in layer.parameters()]
    record = maxmoe.nn.RoutingRecord({"": [batch.experts]})
    with free_moves(), maxmoe.replay_routing(layer, record), kept_tensors(stored) as kept:
        output = layer(batch.x.clone().requires_grad_())
    total = num_bytes(kept)
    output.hidden_states.sum().backward()
    return total


def test_foreign_weights_are_not_kept_for_the_backward() -> None:
    """All ranks together keep the same tensors as without moves, and integers: a row of each expert's plan."""
    config = replace(FAMILIES["mixtral"], hidden_size=32, intermediate_size=64)
    batch = make_batch(config, HOT)

    def check() -> list[tuple[int, int]]:
        mesh, results = Mesh({"expert": 4}), []
        for frozen in (False, True):
            kept = []
            for dispatch in ("ragged_all_to_all", "least_loaded"):
                layer = make_layer(config)
                layer.experts.requires_grad_(not frozen)
                parallelize(layer, mesh, EP, dispatch=dispatch)
                computed = spy(layer)
                kept.append(kept_bytes(layer, part_of(batch, mesh)))
            results.append((kept[1] - kept[0], computed[0].num_foreign))
        return results

    weights_of_an_expert = 3 * 32 * 64 * 8
    for by_rank in zip(*run_ranks(check, 4), strict=True):
        more, num_foreign = map(sum, zip(*by_rank, strict=True))
        assert num_foreign >= 3 and more < weights_of_an_expert / 2


def test_moves_that_do_not_pay_are_not_made() -> None:
    """Without moves, a step has the bits of a ragged all-to-all."""
    batch = make_batch(FAMILIES["deepseek_v3"], HOT)

    def check() -> None:
        mesh, outcomes = Mesh({"expert": 2}), []
        for dispatch in ("ragged_all_to_all", "least_loaded"):
            layer = parallelize(make_layer(FAMILIES["deepseek_v3"]), mesh, EP, dispatch=dispatch, num_chunks=2)
            computed = spy(layer)
            with patch.object(least_loaded, "FLOP_PER_BYTE", {"cpu": 100, "cuda": 100}):
                outcomes.append(take_step(layer, part_of(batch, mesh)))
        assert [forward.num_foreign for forward in computed] == [-1, -1]
        ragged, fallen_back = outcomes
        assert fallen_back.hidden_states.equal(ragged.hidden_states)
        for name, gradient in ragged.gradients.items():
            ours, theirs = (getattr(each, "_local_tensor", each) for each in (fallen_back.gradients[name], gradient))
            assert ours.equal(theirs), name

    run_ranks(check, 2)


def test_ranks_with_different_plans_are_an_error_by_name() -> None:
    def check() -> list[str]:
        layer = parallelize(make_layer(FAMILIES["mixtral"]), Mesh({"expert": 4}), EP, dispatch="least_loaded")
        is_other, messages = dist.get_rank() == 1, []
        for change in ({"FLOP_PER_BYTE": {"cpu": 10, "cuda": 10}}, {"TRIED_PERCENT": (115,)}, {}):
            with (
                free_moves(),
                patch.dict(vars(least_loaded), change if is_other else {}),
                torch.autocast("cpu", torch.bfloat16, enabled=is_other and not change),
                pytest.raises(RuntimeError, match="least_loaded: all ranks must derive the same plan") as error,
            ):
                layer(torch.randn(1, 8, 8, dtype=torch.float64))
            messages.append(str(error.value))
        return messages

    first, *others = run_ranks(check, 4)
    assert all(messages == first for messages in others) and len(first) == 3
    for message in first:
        checksums = re.findall(r"rank \d ([0-9a-f]{8})", message)
        assert len(checksums) == 4 and len({checksums[rank] for rank in (0, 2, 3)} - {checksums[1]}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementation": "dense"}, "least_loaded .* implementation must be 'sparse', got 'dense'"),
        ({"buffer_factor": 1.5}, r"least_loaded drops no rows: .* \(1\.5\) .* overflow='chunks', got overflow='drop'"),
        (
            {"implementation": "dense", "capacity_factor": 1.0},
            "got 'least_loaded', which sends rows without their sequences",
        ),
    ],
)
def test_what_it_cannot_run(changes: dict[str, Any], message: str) -> None:
    layer = MoE(replace(FAMILIES["mixtral"], **changes))
    with fake_rank(0, 2), pytest.raises(ValueError, match=message):
        parallelize(layer, Mesh({"expert": 2}), EP, dispatch="least_loaded")
