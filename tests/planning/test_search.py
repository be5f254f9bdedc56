"""`maxmoe.planning.search` against brute force, `estimate`, and steps that run."""

import math
import re
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
from maxmoe import MoEConfig, parallelize
from maxmoe.models import Decoder, DecoderConfig, DecoderOutput
from maxmoe.nn import set_recompute
from maxmoe.parallel import token_sharding
from maxmoe.planning import Device, NoPlanFits, PredictedPlan, StateDtypes, estimate, predict, search
from maxmoe.planning.device import device_names
from maxmoe.planning.search import factorisations
from maxmoe.planning.search_result import ties
from maxmoe.presets.published import PUBLISHED
from maxmoe.sharding import LogicalRules, Mesh
from support.run_ranks import run_ranks
from support.sampling import by_default

MOE = MoEConfig(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2, num_shared_experts=1)
CONFIG = DecoderConfig(
    vocab_size=128, hidden_size=64, num_layers=4, num_dense_layers=1, num_heads=4, intermediate_size=64, moe=MOE
)
STEP: dict[str, Any] = {"batch_size": 16, "sequence_length": 32}
SEARCH = sys.modules["maxmoe.planning.search"]  # the name in the package is the function
DEVICE = replace(Device.load("h100"), ranks_per_node=2)


@cache  # planning leaves a model as it was
def model() -> Decoder:
    return Decoder(CONFIG, device="meta")


@pytest.mark.parametrize(("number", "count"), [(1, 3), (12, 3), (16, 4), (30, 2), (7, 1)])
def test_factorisations_are_those_of_brute_force(number: int, count: int) -> None:
    expected = [sizes for sizes in product(range(1, number + 1), repeat=count) if math.prod(sizes) == number]
    assert sorted(factorisations(number, count)) == expected


AXES = {"ep-as-dp": ("data", "fsdp", "expert"), "pipeline-large-moe": ("stage", "expert", "tensor")}
FEW_AXES = {"ep-as-dp": ("fsdp", "expert"), "pipeline-large-moe": ("stage", "tensor")}


def all_plans(axes: dict[str, tuple[str, ...]]) -> list[PredictedPlan]:
    """Plans of two ranks with two presets, each planned alone."""
    found = []
    meshes = ((rules, names, sizes) for rules, names in axes.items() for sizes in factorisations(2, len(names)))
    for rules, names, sizes in meshes:
        mesh = dict(zip(names, sizes, strict=True))
        strategies = ("ragged_all_to_all", "gather_weights") if mesh.get("expert", 1) > 1 else ("auto",)
        for dispatch, chunks, recompute in product(strategies, (1, 2), ((), ("experts",), ("blocks",))):
            many = 2 * mesh["stage"] if mesh.get("stage", 1) > 1 else 1
            options: dict[str, Any] = {"dispatch": dispatch, "num_chunks": chunks, "recompute": recompute}
            found.append(predict(model(), Mesh.planned(mesh), rules, DEVICE, num_micro_batches=many, **options, **STEP))
    return found


@pytest.mark.parametrize("axes", by_default([FEW_AXES, AXES], [FEW_AXES]), ids=["few axes", "all axes"])
def test_the_first_plan_is_the_fastest_of_all(axes: dict[str, tuple[str, ...]]) -> None:
    plans = all_plans(axes)
    middle = sorted(plan.memory for plan in plans)[len(plans) // 4]
    for limit in (2**40, middle):
        found = search(model(), 2, DEVICE, memory=limit, rules=[*AXES], **STEP)
        fitting = [plan.seconds for plan in plans if plan.memory <= limit]
        assert found.plans[0].seconds <= min(fitting) * (1 + 1e-9)
        assert found.plans[0].memory <= limit
        assert [plan.seconds for plan in found.plans] == sorted(plan.seconds for plan in found.plans)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtypes", [StateDtypes(), StateDtypes(master=torch.bfloat16, moments=torch.bfloat16)])
def test_memory_and_bytes_are_those_of_estimate(dtypes: StateDtypes) -> None:
    whole = Decoder(CONFIG, device="meta", dtype=torch.bfloat16)
    result = search(whole, 2, DEVICE, state_dtypes=dtypes, rules=["default"], num_plans=20, **STEP)
    assert any(plan.has_stages for plan in result.plans) and any(not plan.has_stages for plan in result.plans)
    for plan in result.plans:
        set_recompute(whole, plan.recompute)
        costs = estimate(
            whole,
            Mesh.planned(plan.mesh),
            plan.rules,
            dispatch=plan.dispatch,
            num_chunks=plan.num_chunks,
            num_micro_batches=plan.num_micro_batches if plan.has_stages else None,
            state_dtypes=dtypes,
            **STEP,
        )
        assert plan.memory_parts == costs.memory
        if not plan.has_stages:
            sent = sum(row.bytes for row in costs.traffic)
            assert plan.intra_bytes + plan.inter_bytes == pytest.approx(sent, rel=1e-3, abs=64)
    assert whole.config.recompute == ()


@pytest.mark.parametrize("mesh", [{"expert": 8}, {"fsdp": 4, "expert": 2}], ids=str)
def test_a_plan_without_a_strategy_takes_the_one_of_estimate(mesh: dict[str, int]) -> None:
    found = predict(model(), Mesh.planned(mesh), "ep-as-dp", DEVICE, **STEP)
    costs = estimate(model(), Mesh.planned(mesh), "ep-as-dp", **STEP)
    assert found.memory == sum(costs.memory.values())
    assert found.intra_bytes + found.inter_bytes == sum(row.bytes for row in costs.traffic)


def test_more_memory_never_gives_a_slower_plan() -> None:
    times = []
    for limit in range(2_400_000, 4_800_001, 1_200_000):
        try:
            found = search(model(), 2, DEVICE, memory=limit, rules=["default"], num_plans=1, **STEP)
            times.append(found.plans[0].seconds)
        except NoPlanFits:
            times.append(math.inf)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_a_step_is_not_slower_with_more_bandwidth() -> None:
    slow = DEVICE
    for level in ("intra_node", "inter_node"):
        link = getattr(DEVICE, level)
        fast = replace(slow, **{level: replace(link, bandwidth=2 * link.bandwidth)})
        meshes = {"pure-fsdp": {"fsdp": 4}, "ep-as-dp": {"expert": 4}, "ep-tp": {"data": 2, "expert": 2}}
        for rules, mesh in meshes.items():
            before, after = (
                predict(model(), Mesh.planned(mesh), rules, device, **STEP).seconds for device in (slow, fast)
            )
            assert after <= before
        slow = fast


def run_all(plans: list[PredictedPlan]) -> list[float]:
    return [run(plan) for plan in plans]


def run(plan: PredictedPlan) -> float:
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
    plans = search(model(), 2, DEVICE, rules=["ep-as-dp", "pipeline-large-moe"], num_plans=40, **STEP).plans
    found = [plan for plan in plans if not plan.has_stages][:2]
    found += [plan for plan in plans if plan.has_stages][:1]
    assert len(found) == 3
    for losses in run_ranks(run_all, 2, found):
        assert len(losses) == 3 and all(map(math.isfinite, losses))


def test_no_plan_fits() -> None:
    with pytest.raises(NoPlanFits) as raised:
        search(model(), 2, DEVICE, memory=100_000, rules=["ep-as-dp"], **STEP)
    nearest = raised.value.nearest
    assert len(nearest) == 3
    assert [plan.memory for plan in nearest] == sorted(plan.memory for plan in nearest)
    for plan in nearest:
        assert f"{plan.memory - 100_000} bytes" in str(raised.value)


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


@pytest.mark.parametrize("plan", [search, predict, estimate])
def test_sequences_that_the_forward_refuses_are_not_planned(plan: Callable[..., Any]) -> None:
    short = nn.Sequential(Decoder(replace(CONFIG, max_sequence_length=16)))
    with pytest.raises(ValueError, match="at most 16 positions"):
        short(torch.zeros(1, 32, dtype=torch.int64))
    where = {search: (2, DEVICE), predict: (Mesh.planned({"fsdp": 2}), "default", DEVICE)}
    message = r"^sequence_length \(32\) must not exceed max_sequence_length \(16\) of Decoder$"
    with pytest.raises(ValueError, match=message):
        plan(short, *where.get(plan, (Mesh.planned({"fsdp": 2}), "default")), **STEP)
    plan(short, *where.get(plan, (Mesh.planned({"fsdp": 2}), "default")), **STEP | {"sequence_length": 16})


def test_the_default_is_mixed_precision_of_parameters_that_are_narrower_than_float32() -> None:
    mesh, numbers = Mesh.planned({"fsdp": 2}), {}
    for dtype in (torch.bfloat16, torch.float32):
        whole = Decoder(CONFIG, device="meta", dtype=dtype)
        memory = estimate(whole, mesh, "default", **STEP).memory
        numbers[dtype] = [memory[name] / memory["parameters"] for name in ("gradients", "state of adamw")]
        numbers[dtype] += [memory.get("master weights", 0) / memory["parameters"]]
    # 2 + 2 + 8 + 4 bytes per parameter, and 4 + 4 + 8.
    assert numbers == {torch.bfloat16: [1.0, 4.0, 2.0], torch.float32: [1.0, 2.0, 0.0]}


def test_a_plan_is_named_after_the_default_rules_if_they_give_it() -> None:
    plans = search(model(), 2, DEVICE, num_plans=1000, **STEP).plans
    names = {axis: {plan.rules for plan in plans if dict(plan.mesh) == {axis: 2}} for axis in ("data", "fsdp")}
    assert names == {"data": {"default"}, "fsdp": {"default", "fsdp-as-dp-for-attn"}}
    assert {"ep-as-dp", "ep-tp"} <= {plan.rules for plan in plans}  # whose plans differ


@pytest.mark.parametrize("device", device_names())
def test_communication_that_starts_early_is_not_free(device: str) -> None:
    """With FSDP alone and a large batch, products would hide all collectives."""
    config = DecoderConfig.of_published(PUBLISHED["mixtral"], num_layers=2)
    dtype = next(iter(Device.load(device).peak_flops))
    whole = Decoder(config, device="meta", dtype=getattr(torch, dtype))
    found = predict(whole, Mesh.planned({"fsdp": 2}), "pure-fsdp", device, batch_size=256, sequence_length=4096)
    assert found.compute > 20 * (found.hidden + found.exposed) and found.exposed > 0.05 * found.hidden


def test_the_reason_why_no_plan_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of any mesh is raised unchanged; if all meshes are refused, the error has their numbers."""
    dense = Decoder(replace(CONFIG, moe=replace(MOE, implementation="dense")), device="meta")
    with pytest.raises(ValueError, match=r"^the tensors that implementation='dense' saves are not known$"):
        search(dense, 2, DEVICE, **STEP)
    own = maxmoe.MoE(MOE, activation=torch.mul, device="meta")
    with pytest.raises(
        ValueError, match=r"^the tensors that a custom activation saves are not known: plan with a named"
    ):
        search(own, 2, DEVICE, **STEP)
    monkeypatch.setattr(SEARCH, "MeshCosts", raises("moe: experts do not divide"))
    with pytest.raises(ValueError, match=r"^no plan of 2 ranks can be made: \d+ meshes .*: experts do not divide$"):
        search(model(), 2, DEVICE, rules=["ep-as-dp"], **STEP)


def raises(message: str) -> Any:
    def function(*_: object) -> None:
        raise ValueError(message)

    return function


def test_the_text_says_what_runs_and_what_is_excluded() -> None:
    text = str(search(model(), 4, DEVICE, rules=["ep-as-dp"], **STEP))
    assert "To run plan 1:" in text and "maxmoe." in text and "divide tokens and experts.\n" in text
    assert "Not tried at all:" in text


class Mixer(nn.Module):
    """Computes with the sequence of a token, and declares nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


def test_sequences_of_modules_that_may_mix_tokens_stay_whole() -> None:
    options: dict[str, Any] = {"rules": ["cp-as-ep"], "num_plans": 100, **STEP}
    found = search(nn.Sequential(model(), Mixer()), 2, DEVICE, **options)
    assert not any("context" in plan.mesh for plan in found.plans)
    assert any("sequences are sharded, and Mixer declare nothing" in reason for reason in found.cannot_run)
    assert any("context" in plan.mesh for plan in search(model(), 2, DEVICE, **options).plans)


@pytest.mark.parametrize("preset", ["ep-as-dp", "pipeline-large-moe"])
def test_every_mesh_is_counted_once(preset: str) -> None:
    options: dict[str, Any] = {"rules": [preset], "memory": 3 << 20, **STEP, "batch_size": 12}
    found = search(model(), 6, DEVICE, num_plans=10_000, **options)
    meshes = {str(plan.mesh) for plan in found.plans}
    assert found.num_over_memory and found.cannot_run and not found.refused and not found.num_left
    assert found.num_considered == len(meshes) + found.num_over_memory


def test_ties_are_one_group_described_by_what_differs() -> None:
    plan = predict(model(), Mesh.planned({"fsdp": 2}), "pure-fsdp", DEVICE, **STEP)
    slower = replace(plan, compute=plan.compute + 0.02 * plan.seconds, mesh={"data": 2}, rules="default")
    slowest = replace(plan, compute=plan.compute + 0.04 * plan.seconds)
    assert list(ties([plan, slower, slowest])) == [
        "Plans 1 to 2 differ by less than 3%, which the model cannot tell apart, in fsdp (2, 1), data (1, 2), rules "
        "(pure-fsdp, default)."
    ]


def test_the_text_says_what_the_figures_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    dtypes = StateDtypes(moments=torch.bfloat16)
    whole = Decoder(CONFIG, device="meta", dtype=torch.bfloat16)
    found = search(whole, 2, DEVICE, rules=["ep-as-dp"], state_dtypes=dtypes, **STEP)
    first, *lines = str(found).splitlines()
    assert first.startswith("A ranking by a model of time, not a promise: for seven published runs") and "83 %" in first
    text = "\n".join(lines)
    assert "bfloat16 parameters and activations, bfloat16 gradients, bfloat16 moments, float32 master weights" in text
    assert "Products reach 79% of the peak of 989 TFLOPS" in text and "360 GB/s within its node and 45 GB/s" in text
    plan = found.plans[0]
    for name, count in plan.memory_parts.items():
        assert any(line.startswith(name) for line in lines) and count >= 0
    assert plan.model_flops <= plan.flops
    assert plan.mfu == pytest.approx(plan.model_flops / plan.seconds / 989e12)


def test_recomputation_is_no_work_of_the_model() -> None:
    plans = [
        predict(model(), Mesh.planned({"fsdp": 2}), "pure-fsdp", DEVICE, recompute=names, **STEP)
        for names in ((), ("blocks",))
    ]
    assert plans[0].flops == plans[0].model_flops == plans[1].model_flops < plans[1].flops


def test_an_interrupted_search_has_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real, num_calls = SEARCH.MeshCosts, 0

    def interrupted_after(limit: int) -> Any:
        def costs(*arguments: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls > limit:
                raise KeyboardInterrupt
            return real(*arguments)

        return costs

    whole = search(model(), 2, DEVICE, rules=["ep-as-dp"], **STEP)
    number = whole.num_considered
    assert whole.is_refined and "Interrupted" not in str(whole)
    for limit, text in (
        (1, f"Interrupted: {number - 1} of {number} meshes"),
        (number, "Interrupted: not all strategies"),
    ):
        num_calls = 0
        monkeypatch.setattr(SEARCH, "MeshCosts", interrupted_after(limit))
        found = search(model(), 2, DEVICE, rules=["ep-as-dp"], **STEP)
        assert len(found.plans) == limit and found.num_left == number - limit and text in str(found)
    num_calls = 0
    monkeypatch.setattr(SEARCH, "MeshCosts", interrupted_after(0))
    with pytest.raises(KeyboardInterrupt):
        search(model(), 2, DEVICE, rules=["ep-as-dp"], **STEP)


def test_more_ranks_or_other_dtypes_are_named_where_they_would_do() -> None:
    whole = Decoder(CONFIG, device="meta", dtype=torch.bfloat16)
    small = search(whole, 2, DEVICE, rules=["pure-fsdp"], **STEP).plans
    limit = min(plan.memory for plan in small) - 1
    with pytest.raises(NoPlanFits) as raised:
        search(whole, 2, DEVICE, memory=limit // 2, rules=["pure-fsdp"], **STEP)
    text = str(raised.value)
    number = int(re.search(r"It fits on (\d+) ranks", text)[1])  # type: ignore[index]
    options: dict[str, Any] = {"memory": limit // 2, "rules": ["pure-fsdp"], **STEP}
    assert search(whole, number, DEVICE, **options).plans
    assert ("It fits with" in text) == _fits(whole, limit // 2)


def _fits(whole: Decoder, limit: int) -> bool:
    try:
        narrow = StateDtypes(master=torch.bfloat16, moments=torch.bfloat16)
        return bool(search(whole, 2, DEVICE, memory=limit, rules=["pure-fsdp"], state_dtypes=narrow, **STEP).plans)
    except NoPlanFits:
        return False


def test_parallelize_is_what_the_call_names() -> None:
    assert parallelize.__name__ in predict(model(), Mesh.planned({"fsdp": 2}), "pure-fsdp", DEVICE, **STEP).call


def test_without_stages_the_whole_batch_is_one_micro_batch() -> None:
    mesh = Mesh.planned({"fsdp": 2})
    one, many = (predict(model(), mesh, "pure-fsdp", DEVICE, num_micro_batches=count, **STEP) for count in (1, 4))
    assert many == one and many.num_micro_batches == 1


def test_what_cannot_be_predicted() -> None:
    rules = LogicalRules.load("pipeline-large-moe")
    undeclared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    staged = Mesh.planned({"stage": 4})
    with pytest.raises(ValueError, match=r"^Sequential must declare its pipeline_parts, see maxmoe.parallel.Decl"):
        predict(undeclared, staged, rules, DEVICE, num_micro_batches=4, **STEP)
    with pytest.raises(ValueError, match=r"num_micro_batches must be at least the number of stages \(4\)"):
        predict(model(), staged, rules, DEVICE, num_micro_batches=2, **STEP)
    assert ", rules, " in predict(model(), Mesh.planned({"fsdp": 2}), rules, DEVICE, **STEP).call
