"""`maxmoe.costs.search` against measuring all plans, `estimate`, and steps that run."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxmoe
from maxmoe import MoEConfig
from maxmoe.costs import Device, FoundPlan, NoPlanFits, StateDtypes, estimate, search
from maxmoe.costs.candidates import Candidates, factorisations
from maxmoe.costs.search import recompute_choices
from maxmoe.costs.step_time import step_time
from maxmoe.models import Decoder, DecoderConfig, DecoderOutput
from maxmoe.nn import set_recompute
from maxmoe.parallel import token_sharding
from maxmoe.sharding import Mesh
from support.run_ranks import run_ranks
from support.sampling import by_default

MOE = MoEConfig(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, num_shared_experts=1)
CONFIG = DecoderConfig(
    vocab_size=128, hidden_size=64, num_layers=4, num_dense_layers=1, num_heads=4, intermediate_size=64, moe=MOE
)
STEP: dict[str, Any] = {"batch_size": 16, "sequence_length": 32}
SEARCH = sys.modules["maxmoe.costs.search"]  # the name in the package is the function
DEVICE = replace(Device.load("h100"), ranks_per_node=2)


@cache  # a search leaves a model as it was
def model() -> Decoder:
    return Decoder(CONFIG, device="meta")


@pytest.mark.parametrize(("number", "count"), [(1, 3), (12, 3), (16, 4), (30, 2), (7, 1)])
def test_factorisations_are_those_of_brute_force(number: int, count: int) -> None:
    expected = [sizes for sizes in product(range(1, number + 1), repeat=count) if math.prod(sizes) == number]
    assert sorted(factorisations(number, count)) == expected


MESHES = {
    "ep-as-dp": [{"data": 2}, {"fsdp": 2}, {"expert": 2}],
    "pipeline-large-moe": [{"stage": 2}, {"tensor": 2}],
}


def measured(rules: str, mesh: dict[str, int], dispatch: str, recompute: tuple[str, ...]) -> tuple[float, int]:
    """Seconds and bytes of a step of two ranks."""
    whole, many = Decoder(replace(CONFIG, recompute=recompute), device="meta"), 16 if "stage" in mesh else 1
    options: dict[str, Any] = {"num_micro_batches": many if "stage" in mesh else None, "allow_unused": True, **STEP}
    costs = estimate(whole, Mesh.planned(mesh), rules, dispatch=dispatch, **options)
    time = step_time(costs.ranks, many, DEVICE.peak(torch.float32), Mesh.planned(mesh), DEVICE)
    return time.seconds, sum(costs.memory.values())


@pytest.mark.parametrize("rules", by_default([["ep-as-dp"], [*MESHES]], [["ep-as-dp"]]), ids=str)
def test_the_first_plan_is_the_fastest_of_all(rules: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SEARCH, "MOST_MEASURED", 100)
    measured(
        "ep-as-dp", {"data": 2}, "auto", ()
    )  # the first step of a process counts some additions of gradients twice
    all_plans = []  # for each mesh and strategy, with more and more recomputation
    for name in rules:
        for mesh in MESHES[name]:
            strategies = ("ragged_all_to_all", "ring_of_experts", "gather_weights") if "expert" in mesh else ("auto",)
            for dispatch in strategies:
                all_plans.append([measured(name, mesh, dispatch, names) for names in recompute_choices(model())])
    memories = sorted(memory for plans in all_plans for _, memory in plans)
    for limit in (2**40, memories[len(memories) // 4]):
        found = search(model(), 2, DEVICE, memory=limit, rules=rules, **STEP).plans
        fitting = [next((seconds for seconds, memory in plans if memory <= limit), math.inf) for plans in all_plans]
        assert found[0].seconds == min(fitting)
        assert all(plan.memory <= limit for plan in found)
        assert [plan.seconds for plan in found] == sorted(plan.seconds for plan in found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtypes", [StateDtypes(), StateDtypes(master=torch.bfloat16, moments=torch.bfloat16)])
def test_memory_is_that_of_estimate_and_arithmetic_is_below_it(dtypes: StateDtypes) -> None:
    whole = Decoder(CONFIG, device="meta", dtype=torch.bfloat16)
    result = search(whole, 2, DEVICE, state_dtypes=dtypes, rules=["default"], num_plans=20, **STEP)
    assert any(plan.has_stages for plan in result.plans) and any(not plan.has_stages for plan in result.plans)
    step = SEARCH.Step(*STEP.values(), DEVICE, dtypes)
    stored = {(each.sizes, each.dispatch): each.stored for each in Candidates(whole, ["default"], step, 1.0).of(2)[0]}
    for plan in result.plans:
        set_recompute(whole, plan.recompute)
        costs = estimate(
            whole,
            Mesh.planned(plan.mesh),
            plan.rules,
            dispatch=plan.dispatch,
            num_micro_batches=plan.num_micro_batches if plan.has_stages else None,
            state_dtypes=dtypes,
            **STEP,
        )
        assert plan.memory_parts == costs.memory
        exact = sum(size for name, size in costs.memory.items() if name not in ("activations", "temporary"))
        counted = stored[tuple(plan.mesh.items()), plan.dispatch]
        assert counted <= exact if plan.has_stages else counted == pytest.approx(exact, rel=1e-3)


def run_all(plans: list[FoundPlan]) -> list[float]:
    return [run(plan) for plan in plans]


def run(plan: FoundPlan) -> float:
    torch.manual_seed(0)
    whole, mesh = Decoder(CONFIG), Mesh(plan.mesh)
    names: dict[str, Any] = {"model": whole, "maxmoe": maxmoe, "Mesh": lambda _sizes: mesh, "loss": mean_square}
    exec(plan.call, names)
    tokens = torch.randint(128, (STEP["batch_size"], STEP["sequence_length"]))
    if plan.has_stages:
        mine = tokens[token_sharding(mesh.within_stage(), plan.rules).slices(tokens.shape)]
        return float(names["pipeline"].step(mine, mine).loss)
    output = names["model"](tokens[token_sharding(mesh, plan.rules).slices(tokens.shape)])
    output.logits.square().mean().backward()
    return float(output.logits.detach().sum())


def mean_square(output: DecoderOutput, _targets: Tensor) -> Tensor:
    return output.logits.square().mean()


def test_the_plans_run_as_they_are_printed() -> None:
    result = search(model(), 2, DEVICE, rules=["ep-as-dp", "pipeline-large-moe"], num_plans=40, **STEP)
    text = str(result)
    assert "To run plan 1:" in text and result.plans[0].call in text and f"{result.num_measured} steps were" in text
    found = [plan for plan in result.plans if not plan.has_stages][:2]
    found += [plan for plan in result.plans if plan.has_stages][:1]
    assert len(found) == 3
    for losses in run_ranks(run_all, 2, found):
        assert len(losses) == 3 and all(map(math.isfinite, losses))


def test_where_no_plan_fits_more_ranks_are_named() -> None:
    options: dict[str, Any] = {"rules": ["pure-fsdp"], "memory": 1_800_000, **STEP}
    with pytest.raises(NoPlanFits, match=r"(?s)no plan fits in .*bytes\) are missing.*It fits on 8 ranks") as raised:
        search(model(), 2, DEVICE, **options)
    nearest = raised.value.nearest
    assert [plan.memory for plan in nearest] == sorted(plan.memory for plan in nearest) and nearest
    assert all(f"{plan.memory - 1_800_000} bytes" in str(raised.value) for plan in nearest)
    assert raised.value.num_ranks == 8 and search(model(), 8, DEVICE, **options).plans
    with pytest.raises(NoPlanFits):
        search(model(), 4, DEVICE, **options)
    options |= {"rules": ["ep-as-dp"], "memory": 100_000}
    with pytest.raises(NoPlanFits, match="No plan was found that fits on more ranks") as raised:
        search(model(), 2, DEVICE, **options)
    assert len(raised.value.nearest) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 3}, "no mesh of 4 ranks can run the batch"),
        ({"device": "h10"}, "there is no device 'h10'; the nearest are 'h100'"),
        ({"device": replace(DEVICE, peak_flops={"float16": 1.0})}, "has no peak in float32, only in float16"),
        ({"rules": ["ep-as-pd"]}, "there is no preset 'ep-as-pd'"),
        ({"memory": 0}, "memory must be a positive number of bytes"),
        ({"world_size": 0}, "world_size must be a positive int"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"world_size": 4, "device": DEVICE, "rules": ["ep-as-dp"], **STEP, **changes}
    with pytest.raises(ValueError, match=message):
        search(model(), options.pop("world_size"), options.pop("device"), **options)


class Mixer(nn.Module):
    """Computes with the sequence of a token, and declares nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


def test_sequences_of_modules_that_may_mix_tokens_stay_whole() -> None:
    step = SEARCH.Step(*STEP.values(), DEVICE, StateDtypes())
    mixing = nn.Sequential(Decoder(CONFIG, device="meta"), Mixer())
    found, others, _ = Candidates(mixing, ["cp-as-ep"], step, 1.0).of(2)
    assert found and not any("context" in dict(each.sizes) for each in found)
    assert any("sequences are sharded, and Mixer declare nothing" in reason for reason in others)
    assert any("context" in dict(each.sizes) for each in Candidates(model(), ["cp-as-ep"], step, 1.0).of(2)[0])


def interrupting(real: Callable[..., Any], limit: int) -> Callable[..., Any]:
    calls = []

    def estimated(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > limit:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    return estimated


def test_an_interrupted_search_has_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search first measures a step on one rank."""
    monkeypatch.setenv("COLUMNS", "1000")
    for limit in (1, 3):
        monkeypatch.setattr(SEARCH, "estimate", interrupting(estimate, limit))
        if limit == 1:
            with pytest.raises(KeyboardInterrupt):
                search(model(), 2, DEVICE, rules=["ep-as-dp"], **STEP)
            continue
        found = search(model(), 2, DEVICE, rules=["ep-as-dp"], **STEP)
        assert len(found.plans) == 2 and not found.is_complete and "the search was interrupted" in str(found)
