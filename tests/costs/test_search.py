"""`maxmoe.costs.search` against measuring all plans, and steps that run; devices and the time of operators on them."""

import copy
import importlib
import math
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest
import torch
from torch import Tensor, nn

import maxmoe
from maxmoe import MoE, MoEConfig
from maxmoe.costs import Device, FoundPlan, NoPlanFits, StateDtypes, estimate, search
from maxmoe.costs.candidates import STRATEGIES, Candidates, Step
from maxmoe.costs.search import recompute_choices
from maxmoe.costs.step_time import step_time
from maxmoe.models import Decoder, DecoderConfig, DecoderOutput
from maxmoe.nn import set_recompute
from maxmoe.parallel import token_sharding
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import Mesh
from support.run_ranks import run_ranks

MOE = MoEConfig(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, num_shared_experts=1)
CONFIG = DecoderConfig(
    vocab_size=128, hidden_size=64, num_layers=2, num_dense_layers=1, num_heads=4, intermediate_size=64, moe=MOE
)
STEP: dict[str, Any] = {"batch_size": 8, "sequence_length": 32}
DEVICE = replace(Device.load("h100"), ranks_per_node=2)
DTYPES = StateDtypes(master=torch.bfloat16)
MODEL = Decoder(CONFIG, device="meta", dtype=torch.bfloat16)  # a search leaves it as it was
SEARCH = importlib.import_module("maxmoe.costs.search")  # the package has a function of this name
LAYER = MoE(MOE).to("meta", torch.bfloat16)  # measured in a third of the time
MESHES: list[tuple[str, Dispatch]] = [("data", "auto"), ("fsdp", "auto"), *(("expert", each) for each in STRATEGIES)]


@cache
def measured(axis: str, dispatch: Dispatch, recompute: tuple[str, ...]) -> tuple[float, int]:
    """Seconds and bytes of a step of two ranks."""
    set_recompute(layer := copy.deepcopy(LAYER), recompute)
    mesh = Mesh.planned({axis: 2})
    costs = estimate(layer, mesh, "ep-as-dp", dispatch=dispatch, allow_unused=True, state_dtypes=DTYPES, **STEP)
    seconds = step_time(costs.ranks, 1, DEVICE.peak(torch.bfloat16), mesh, DEVICE).seconds
    return seconds, sum(costs.memory.values())


def estimates(*errors: Any) -> Any:
    """Count the steps that a search measures; `errors` has what each raises, or DEFAULT."""
    return patch.object(SEARCH, "estimate", wraps=estimate, side_effect=errors or None)


def test_the_first_plan_is_the_fastest_of_all_that_fit() -> None:
    _, memory = min(measured(*each, ()) for each in MESHES)
    limit, fitting = memory - 1, []  # the fastest plan of all does not fit
    for each in MESHES:
        plans = (measured(*each, recompute) for recompute in recompute_choices(LAYER))
        fitting += [next((seconds for seconds, memory in plans if memory <= limit), math.inf)]
    found = search(LAYER, 2, DEVICE, memory=limit, rules=["ep-as-dp"], state_dtypes=DTYPES, **STEP).plans
    assert found[0].seconds == min(fitting)
    assert all(plan.memory <= limit for plan in found)
    assert [plan.seconds for plan in found] == sorted(plan.seconds for plan in found)


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
    result = search(MODEL, 2, DEVICE, state_dtypes=DTYPES, rules=["default"], **STEP)
    assert "To run plan 1:" in str(result) and result.plans[0].call in str(result)
    with_stages = [plan.has_stages for plan in result.plans]
    for losses in run_ranks(run_all, 2, [result.plans[with_stages.index(which)] for which in (False, True)]):
        assert len(losses) == 2 and all(map(math.isfinite, losses))
    # What a rank stores is at least what arithmetic says, by which plans are left out.
    step = Step(*STEP.values(), DEVICE, DTYPES)  # type: ignore[call-arg]
    stored = {(each.sizes, each.dispatch): each.stored for each in Candidates(MODEL, ["default"], step, 1.0).of(2)}
    for plan in result.plans:
        exact = plan.memory - plan.costs.memory["activations"] - plan.costs.memory["temporary"]
        counted = stored[tuple(plan.mesh.items()), plan.dispatch]
        assert counted <= exact if plan.has_stages else counted == pytest.approx(exact, rel=1e-3)


def test_where_no_plan_fits_more_ranks_are_named() -> None:
    options: dict[str, Any] = {"rules": ["pure-fsdp"], "memory": 600_000, **STEP}
    message = r"(?s)no plan fits in .* bytes\) are missing.*It fits on 4 ranks"
    with estimates() as steps, pytest.raises(NoPlanFits, match=message) as raised:
        search(LAYER, 2, DEVICE, **options)
    assert steps.call_count == 1 + len(recompute_choices(LAYER)) + 1  # on one rank, two and four: none twice
    assert f"{raised.value.nearest.memory - options['memory']} bytes" in str(raised.value)
    assert raised.value.num_ranks is not None and search(LAYER, raised.value.num_ranks, DEVICE, **options).plans
    with pytest.raises(NoPlanFits, match="No plan was found that fits on more ranks"):
        search(LAYER, 2, DEVICE, **options | {"memory": 100_000})


class Mixer(nn.Module):
    """Computes with the sequence of a token, and declares nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


def test_sequences_of_modules_that_may_mix_tokens_stay_whole() -> None:
    step = Step(*STEP.values(), DEVICE, DTYPES)  # type: ignore[call-arg]
    for model, is_sharded in ((MODEL, True), (nn.Sequential(MODEL, Mixer()), False)):
        found = Candidates(model, ["cp-as-ep"], step, 1.0)
        assert any("context" in dict(each.sizes) for each in found.of(2)) == is_sharded
        assert found.undeclared == ([] if is_sharded else ["Mixer"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 3}, "no plan of 4 ranks can run 3 sequences of 32 tokens"),
        ({"device": "h10"}, "there is no device 'h10'; the nearest are 'h100'"),
        ({"device": replace(DEVICE, peak_flops={"float16": 1.0})}, "has no peak in bfloat16, only in float16"),
        ({"rules": ["ep-as-pd"]}, "there is no preset 'ep-as-pd'"),
        ({"memory": 0}, "memory must be a finite float > 0.0, got 0"),
        ({"world_size": 0}, "world_size must be a positive int"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"world_size": 4, "device": DEVICE, "rules": ["ep-as-dp"], **STEP, **changes}
    with pytest.raises(ValueError, match=message):
        search(LAYER, **options)


def test_an_interrupted_search_has_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search first measures a step on one rank."""
    monkeypatch.setenv("COLUMNS", "1000")
    with estimates(DEFAULT, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        search(LAYER, 2, DEVICE, rules=["ep-as-dp"], **STEP)
    with estimates(DEFAULT, DEFAULT, DEFAULT, KeyboardInterrupt):
        found = search(LAYER, 2, DEVICE, rules=["ep-as-dp"], **STEP)
    assert len(found.plans) == 2 and not found.is_complete and "the search was interrupted" in str(found)


def test_refused_steps_are_no_plans_and_few_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SEARCH, "MOST_MEASURED", 3)
    with estimates(DEFAULT, ValueError("refused"), DEFAULT, DEFAULT) as steps:
        found = search(LAYER, 2, DEVICE, rules=["ep-as-dp"], **STEP)
    assert steps.call_count == 1 + 3 and len(found.plans) == 2
