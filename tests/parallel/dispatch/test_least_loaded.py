"""Experts that move to ranks with few rows: the numbers of one process, bounds on rows and memory, errors."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE, MoEConfig
from maxmoe.parallel import parallelize, parameter_shardings, token_sharding
from maxmoe.parallel.dispatch import least_loaded
from maxmoe.parallel.dispatch.lent_experts import LentExperts
from maxmoe.sharding import LogicalRules, Mesh
from support.dispatched_layer import (
    FAMILIES,
    LOADS,
    NUM_EXPERTS,
    Batch,
    Outcome,
    check_part,
    make_batch,
    make_layer,
    take_step,
)
from support.measured_step import kept_tensors, num_bytes
from support.moved_experts import make_moves_free
from support.named import named
from support.parallel_decoder import MeshRules
from support.run_ranks import fake_rank, run_ranks
from support.sampling import by_default

EP = LogicalRules.load("ep-as-dp")
HOT = ("a quarter to one expert", "three quarters to one expert")


@pytest.fixture(autouse=True)
def moves_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    make_moves_free(monkeypatch)


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


def hot_batch(config: MoEConfig, load: str) -> Batch:
    """A batch with a share of its slots on the first expert, and the others distributed evenly."""
    if load in LOADS:
        return make_batch(config, load)
    batch = replace(make_batch(config, "even"))
    assert batch.experts is not None
    places = torch.arange(batch.experts.numel()).view(batch.experts.shape) % 4
    is_hot = places < (1 if load == HOT[0] else 3)
    return replace(batch, experts=batch.experts.masked_fill(is_hot, 0))


@pytest.mark.parametrize("num_ranks", by_default([2, 4, 8], [4]))
@pytest.mark.parametrize("turn", by_default(range(3), [0]))
def test_families_and_loads(turn: int, num_ranks: int) -> None:
    """Loads from even to all tokens on one expert; no rank computes more than 1.15 times the mean.

    Each turn takes every third load of a family.
    """
    loads = ("even", HOT[1], "all to one expert") if num_ranks == 8 else (*LOADS, *HOT)
    cases: dict[str, list[tuple[str, Batch, Outcome]]] = {family: [] for family in FAMILIES}
    for number, (family, config) in enumerate(FAMILIES.items()):
        for load in loads[(number + turn) % 3 :: 3]:
            batch = hot_batch(config, load)
            cases[family].append((load, batch, take_step(make_layer(config), batch)))

    def check() -> dict[Any, Computed]:
        mesh, found = Mesh({"expert": num_ranks}), {}
        for family, batches in cases.items():
            layer = make_layer(FAMILIES[family])
            shardings = parameter_shardings(layer, mesh, EP)
            parallelize(layer, mesh, EP, dispatch="least_loaded")
            computed = spy(layer)
            for load, batch, expected in batches:
                part = token_sharding(mesh, EP).slices(batch.x.shape[:2])
                with named(family, load):
                    check_part(take_step(layer, batch.part(part)), expected, part, shardings)
                (found[family, load],) = computed
                computed.clear()
        return found

    by_rank = run_ranks(check, num_ranks)
    for case, expected in (((family, load), of_one) for family, each in cases.items() for load, _, of_one in each):
        computed = [found[case] for found in by_rank]
        rows = [rank.own + rank.foreign for rank in computed]
        routed = expected.stats.tokens_per_expert[:NUM_EXPERTS].view(num_ranks, -1).sum(1).tolist()
        assert sum(rows) == sum(routed)
        bound = max(-(-sum(rows) // num_ranks), 1.15 * sum(rows) / num_ranks)
        assert max(rows) <= bound, (case, computed)
        is_moved = max(rank.num_foreign for rank in computed) > 0
        assert is_moved == (max(routed) > bound), (case, computed)
        assert is_moved or rows == routed
        # The bound of tests/parallel/dispatch/test_expert_moves.py.
        assert max(rank.num_foreign for rank in computed) <= NUM_EXPERTS // num_ranks + num_ranks - 1


def in_a_checkpoint(context_fn: Any, layer: MoE) -> Callable[..., Any]:
    options = {} if context_fn is None else {"context_fn": context_fn}
    return lambda *arguments: checkpoint(layer, *arguments, use_reentrant=False, **options)


LAYOUTS = [
    MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2}),  # FSDP2
    MeshRules("ep-as-dp", {"fsdp_transpose": 2, "expert": 2}),  # gathered by hooks of the experts
    MeshRules("cp-as-ep", {"context": 2, "expert": 2}),
    MeshRules("default", {"expert": 2, "tensor": 2}),
    MeshRules("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2}),
    MeshRules("ep-tp", {"data": 2, "expert": 2}),  # all ranks of the experts hold the same tokens
]
# Recomputed parts, and the number of chunks.
OPTIONS: dict[str, tuple[tuple[str, ...], int]] = {
    "mixtral": ((), 1),
    "deepseek_v3": (("dispatch",), 2),
    "gpt_oss": (("dispatch", "experts"), 1),
    "llama4": (("dispatch", "experts"), 3),
}
FORWARDS: dict[str, Callable[[MoE], Callable[..., Any]]] = {
    "as it is": lambda layer: layer,
    "checkpoint": partial(in_a_checkpoint, None),
    "keep_routing": partial(in_a_checkpoint, maxmoe.keep_routing),
}


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize("turn", by_default(range(len(OPTIONS)), [0]))
@pytest.mark.parametrize("layouts", by_default([LAYOUTS[:4], LAYOUTS[4:]], [LAYOUTS[:4]]), ids=["four", "others"])
def test_meshes_recomputation_chunks_and_padding(layouts: list[MeshRules], turn: int) -> None:
    """Each layout with another family in each turn. Two steps, since foreign weights are freed and refilled."""
    names, forwards, cases = list(OPTIONS), list(FORWARDS), {}
    choices = [
        (layout, names[(turn + number) % len(names)], forwards[(turn + number) % len(forwards)])
        for number, layout in enumerate(layouts)
    ]
    for name in names:
        batch = hot_batch(FAMILIES[name], HOT[1])
        mask = torch.rand(batch.x.shape[:2], generator=torch.Generator().manual_seed(3)) < 0.8
        padded = replace(batch, x=batch.x.masked_fill(~mask.unsqueeze(2), float("nan")), token_mask=mask)
        padded = replace(padded, experts=batch.experts.masked_fill(~mask.unsqueeze(2), -1))
        cases[name] = padded, take_step(make_layer(FAMILIES[name]), padded)

    def check() -> list[bool]:
        is_moved = []
        for layout, name, forward in choices:
            mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
            (recompute, num_chunks), (batch, expected) = OPTIONS[name], cases[name]
            layer = make_layer(FAMILIES[name])
            shardings = parameter_shardings(layer, mesh, rules)
            options: dict[str, Any] = {"num_chunks": num_chunks, "recompute": recompute}
            parallelize(layer, mesh, rules, dispatch="least_loaded", **options)
            part, computed = token_sharding(mesh, rules).slices(batch.x.shape[:2]), spy(layer)
            with named(layout, name, forward):
                for _ in range(2):
                    got = take_step(layer, batch.part(part), FORWARDS[forward](layer))
                    check_part(got, expected, part, shardings)
            is_moved.append(any(forward.num_foreign > 0 for forward in computed))
        return is_moved

    moved_on_ranks = run_ranks(check, 4)
    for layout, is_moved in zip(layouts, zip(*moved_on_ranks, strict=True), strict=True):
        assert any(is_moved) == (layout.rules != "ep-tp"), layout


def kept_bytes(layer: MoE, batch: Batch) -> int:
    """Bytes that autograd keeps for the backward, without parameters."""
    stored = [getattr(parameter, "_local_tensor", parameter) for parameter in layer.parameters()]
    record = maxmoe.nn.RoutingRecord({"": [batch.experts]})
    with maxmoe.replay_routing(layer, record), kept_tensors(stored) as kept:
        output = layer(batch.x.clone().requires_grad_())
    total = num_bytes(kept)
    output.hidden_states.sum().backward()
    return total


@pytest.mark.parametrize("frozen", [False, True])
def test_foreign_weights_are_not_kept_for_the_backward(frozen: bool) -> None:
    """All ranks together keep the same tensors as without moves, and integers: a row of each expert's plan."""
    config = replace(FAMILIES["mixtral"], hidden_size=32, intermediate_size=64)
    batch = hot_batch(config, HOT[1])

    def check() -> tuple[int, int, int]:
        mesh = Mesh({"expert": 4})
        part, kept = token_sharding(mesh, EP).slices(batch.x.shape[:2]), []
        for dispatch in ("ragged_all_to_all", "least_loaded"):
            layer = make_layer(config)
            layer.experts.requires_grad_(not frozen)
            parallelize(layer, mesh, EP, dispatch=dispatch)
            computed = spy(layer)
            kept.append(kept_bytes(layer, batch.part(part)))
        return kept[0], kept[1], computed[0].num_foreign

    ragged, least_loaded, num_foreign = map(sum, zip(*run_ranks(check, 4), strict=True))
    assert num_foreign >= 3
    weights_of_an_expert = 3 * 32 * 64 * 8
    assert least_loaded - ragged < weights_of_an_expert / 2


def test_moves_that_do_not_pay_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without moves, a step has the bits of a ragged all-to-all."""
    monkeypatch.setattr(least_loaded, "FLOP_PER_BYTE", {"cpu": 100, "cuda": 100})
    batch = hot_batch(FAMILIES["deepseek_v3"], HOT[1])

    def check() -> None:
        mesh, outcomes = Mesh({"expert": 2}), []
        part = batch.part(token_sharding(mesh, EP).slices(batch.x.shape[:2]))
        for dispatch in ("ragged_all_to_all", "least_loaded"):
            layer = parallelize(make_layer(FAMILIES["deepseek_v3"]), mesh, EP, dispatch=dispatch, num_chunks=2)
            computed = spy(layer)
            outcomes.append(take_step(layer, part))
        assert [forward.num_foreign for forward in computed] == [-1, -1]
        ragged, fallen_back = outcomes
        assert fallen_back.hidden_states.equal(ragged.hidden_states)
        for name, gradient in ragged.gradients.items():
            assert local(fallen_back.gradients[name]).equal(local(gradient)), name

    run_ranks(check, 2)


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor; other tensors as they are."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def test_ranks_with_different_plans_are_an_error_by_name() -> None:
    def check() -> list[str]:
        layer = parallelize(make_layer(FAMILIES["mixtral"]), Mesh({"expert": 4}), EP, dispatch="least_loaded")
        is_other, messages = dist.get_rank() == 1, []
        for change in ({"FLOP_PER_BYTE": {"cpu": 10, "cuda": 10}}, {"TRIED_PERCENT": (115,)}, {}):
            with (
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
        ({"buffer_factor": 1.5}, r"least_loaded drops no rows: buffer_factor must be None, got 1\.5"),
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
