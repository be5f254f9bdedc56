"""Adapters of PEFT beside experts on a mesh: every gradient of a factor equals one process's."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe import MoE
from maxmoe.adapters import factor_names, packed_as_by_peft
from maxmoe.costs import estimate, explain
from maxmoe.models import DecoderConfig
from maxmoe.optim import Matrix, Muon, parameter_groups
from maxmoe.parallel import adapter_state_dict, parallelize
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import LogicalRules, Mesh
from support.moved_experts import moving_experts
from support.parallel_decoder import BLOCK, CONFIG, MOE, VARIANTS, MeshRules, batch, decoder, layouts, loss, token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import fake_rank, run_ranks
from support.sampling import cases_by_default

TARGETS = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]


def adapted(config: DecoderConfig = CONFIG, adapters: tuple[str, ...] = ("default",)) -> PeftModel:
    """A decoder with adapters that are not zero, the same at every call."""
    torch.manual_seed(3)
    model: Any = decoder(config)
    options: Any = {"target_modules": [], "target_parameters": TARGETS, "init_lora_weights": False}
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, **options), adapter_name=adapters[0])
    for adapter in adapters[1:]:
        model.add_adapter(adapter, LoraConfig(r=2, lora_alpha=1, **options))
    model.base_model.set_adapter(list(adapters))
    return model.to(torch.float64)


@functools.cache
def of_one_process(config: DecoderConfig, adapters: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    model = adapted(config, adapters)
    tokens, targets = batch()
    output = model(tokens)
    loss(output, targets).backward()
    return output.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def check_step(
    config: DecoderConfig,
    layout: MeshRules,
    dispatch: Dispatch = "auto",
    adapters: tuple[str, ...] = ("default",),
    num_chunks: int = 1,
) -> None:
    logits, gradients = of_one_process(config, adapters)
    mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
    divides = config.moe is not None and config.moe.num_experts % mesh.size("context", "expert") == 0
    dispatch = dispatch if divides else "gather_weights"
    model = parallelize(adapted(config, adapters), mesh, rules, dispatch=dispatch, num_chunks=num_chunks)
    spec = token_spec(mesh, rules)
    tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
    output = model(tokens)
    assert_same(output.logits, part_by_definition(logits, spec, mesh), "logits")
    loss(output, targets).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == gradients.keys() == factor_names(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or parameter.grad is None, name
    for name, parameter in trained.items():
        assert isinstance(parameter.grad, DTensor)
        whole = packed_as_by_peft(name, parameter.grad.full_tensor())
        assert_same(whole, gradients[name], name, scale=float(gradients[name].abs().max()))


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize(
    ("layout", "variant"),
    [
        (layout, variant)
        for layout in layouts(2, 4, 8)
        for variant in list(VARIANTS)[: 2 if layout.world_size == 4 else 1]
    ],
    ids=str,
)
def test_a_step_equals_that_of_one_process(layout: MeshRules, variant: str) -> None:
    run_ranks(lambda: check_step(VARIANTS[variant], layout), layout.world_size)


EXPERT = MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2})


BLOCKS = {
    "gated": BLOCK,
    "not gated": replace(BLOCK, moe=replace(MOE, gated=False)),
    "recomputed": replace(BLOCK, recompute=("experts", "dispatch")),
}


DISPATCHES = ("ring_of_experts", "ragged_all_to_all", "least_loaded", "gather_weights")
REPLICATED = MeshRules("ep-tp", {"data": 2, "expert": 2})
BY_DEFAULT = [("recomputed", "ragged_all_to_all", EXPERT), ("not gated", "gather_weights", REPLICATED)]


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize(
    ("block", "dispatch", "layout"),
    cases_by_default(itertools.product(BLOCKS, DISPATCHES, [EXPERT, REPLICATED]), BY_DEFAULT),
    ids=str,
)
def test_strategies(block: str, dispatch: Dispatch, layout: MeshRules) -> None:
    def check() -> None:
        with moving_experts(dispatch == "least_loaded" and layout == EXPERT):
            check_step(BLOCKS[block], layout, dispatch, ("default", "second"), num_chunks=2)

    run_ranks(check, layout.world_size)


def test_factors_stay_on_the_rank_of_their_expert() -> None:
    def check() -> list[tuple[int, ...]]:
        model = parallelize(adapted(), Mesh({"expert": 2}), "ep-as-dp")
        return [tuple(p.to_local().shape) for n, p in model.named_parameters() if n in factor_names(model)]

    for shapes in run_ranks(check, 2):
        assert shapes and all(shape[0] == MOE.num_experts // 2 and shape[1] == 3 for shape in shapes)


# Saving


def test_adapters_are_saved_for_peft_and_loaded_on_another_mesh(tmp_path: Path) -> None:
    expected = {name: p.detach().clone() for name, p in adapted().named_parameters() if p.requires_grad}

    def save() -> None:
        model = parallelize(adapted(), Mesh({"fsdp": 2, "expert": 2}), "ep-as-dp")
        state_dict = adapter_state_dict(model)
        if dist.get_rank() == 0:
            model.save_pretrained(tmp_path, state_dict=state_dict)

    run_ranks(save, 4)
    loaded = PeftModel.from_pretrained(decoder(), tmp_path, is_trainable=True).to(torch.float64)
    found = {name: p.detach() for name, p in loaded.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].float(), value.float()), name

    def load() -> None:
        model = PeftModel.from_pretrained(decoder(), tmp_path, is_trainable=True).to(torch.float64)
        state_dict = adapter_state_dict(parallelize(model, Mesh({"expert": 2}), "ep-tp"))
        for name, value in expected.items():
            assert torch.equal(state_dict[name].float(), value.float()), name

    run_ranks(load, 2)


# Optimizers and plans


FACTORS = {"*.lora_A.*": Matrix(-1), "*.lora_B.*": Matrix(-2)}  # stacks [r, in] and [r, out] of [out, in] and [in, out]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "muon":
        return Muon(parameter_groups(model, FACTORS), lr=0.01, ns_dtype=torch.float64)
    groups = parameter_groups(model)
    assert all(choice.reason == "low-rank factors of stacked matrices" for choice in groups.choices)
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def trained_factors(optimizer: str, layout: MeshRules) -> dict[str, Tensor]:
    mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
    model = parallelize(adapted(BLOCK), mesh, rules)
    before = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    spec = token_spec(mesh, rules)
    tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
    made = make_optimizer(optimizer, model)
    for _ in range(2):
        made.zero_grad()
        loss(model(tokens), targets).backward()
        made.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), before[name]) != ("lora_" in name), name
    return adapter_state_dict(model)


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [("adamw", MeshRules("ep-as-dp", {"expert": 2})), ("muon", MeshRules("ep-as-dp", {"fsdp": 2}))],
    ids=str,
)
def test_optimizers_train_the_factors_alone(optimizer: str, layout: MeshRules) -> None:
    """Whole matrices on every rank for Muon, which needs them; AdamW computes each entry alone."""
    with fake_rank(0, 1):
        expected = trained_factors(optimizer, MeshRules("ep-as-dp", {"expert": 1}))
    for factors in run_ranks(lambda: trained_factors(optimizer, layout), layout.world_size):
        assert factors.keys() == expected.keys()
        for name, value in factors.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


def test_muon_takes_no_packed_factors() -> None:
    with pytest.raises(ValueError, match="in which PEFT packs the factors of all experts; maxmoe"):
        parameter_groups(adapted(), FACTORS)


def test_frozen_weights_have_no_gradients_and_no_state_in_plans() -> None:
    model, mesh = adapted(), Mesh.planned({"fsdp": 2, "expert": 2})
    before = dict(model.named_parameters())
    plan = estimate(model, mesh, "ep-as-dp", batch_size=8, sequence_length=8)
    local = {parameter.name: parameter for parameter in explain(model, mesh, "ep-as-dp").parameters}
    factors = sum(local[name].local_bytes for name in factor_names(model))
    assert plan.memory["gradients"] == factors and plan.memory["state of adamw"] == 2 * factors
    assert plan.memory["parameters"] == sum(parameter.local_bytes for parameter in local.values())
    assert all(p is before[name] for name, p in model.named_parameters()), "a plan changes nothing"
    whole = estimate(decoder(), mesh, "ep-as-dp", batch_size=8, sequence_length=8)
    gradients = [
        sum(row.bytes for row in each.traffic if row.purpose == "gradients of weights, backward")
        for each in (plan, whole)
    ]
    assert gradients[0] < gradients[1] / 3


@pytest.mark.parametrize("target", ["router.weight", "shared_experts.up_proj", "experts.up_bias"])
def test_adapters_of_other_parts_are_refused(target: str) -> None:
    options: Any = {"target_modules": [], "target_parameters": [target, *TARGETS]}
    model = get_peft_model(decoder(), LoraConfig(r=3, **options))
    before = dict(model.named_parameters())
    with fake_rank(0, 2), pytest.raises(ValueError, match=r"must have no adapters around it, got ParamWrapper"):
        parallelize(model, Mesh({"expert": 2}), "ep-as-dp")
    assert all(p is before[name] for name, p in model.named_parameters())


def test_adapters_must_be_added_and_merged_before_parallelize() -> None:
    def check() -> None:
        model = parallelize(adapted(), Mesh({"fsdp": 2}), "pure-fsdp")
        with pytest.raises(RuntimeError, match="'default' beside down_proj cannot be merged after parallelize"):
            model.merge_adapter()
        options: Any = {"target_modules": [], "target_parameters": TARGETS, "init_lora_weights": False}
        torch.manual_seed(3)
        model.add_adapter("late", LoraConfig(r=2, **options))
        model.set_adapter("late")
        with pytest.raises(RuntimeError, match="'late' beside down_proj has been added after parallelize"):
            model(batch()[0])

    run_ranks(check, 2)


def test_all_adapters_are_collected() -> None:
    """Also adapters of other modules, and adapters that are not active."""

    def check() -> None:
        model: Any = nn.ModuleDict({"dense": nn.Linear(4, 4), "moe": MoE(MOE)})
        options: Any = {"target_modules": ["dense"], "target_parameters": TARGETS}
        model = get_peft_model(model, LoraConfig(r=2, **options))
        model.add_adapter("second", LoraConfig(r=3, **options))
        expected = {name: tuple(p.shape) for name, p in model.named_parameters() if "lora_" in name}
        found = adapter_state_dict(parallelize(model, Mesh({"expert": 2}), "ep-as-dp"))
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected

    run_ranks(check, 2)


def test_trained_parameters_of_two_dtypes_are_not_sharded_together() -> None:
    model = adapted()
    model.base_model.model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.float() if "lora_" in name else parameter.data
        parameter.requires_grad_("lora_" in name or "router.weight" in name)
    message = "FSDP2 shards the trained parameters of .* so they must have one dtype, got torch.(float32|bfloat16) of "
    with fake_rank(0, 2), pytest.raises(ValueError, match=message):
        parallelize(model, Mesh({"fsdp": 2}), "pure-fsdp")


def test_adapters_of_attention_are_named() -> None:
    options: Any = {"target_modules": ["q_proj"], "target_parameters": TARGETS}
    model = get_peft_model(decoder(), LoraConfig(r=2, **options))
    with fake_rank(0, 2), pytest.raises(ValueError, match=r"attention.q_proj has adapters around it"):
        parallelize(model, Mesh({"expert": 2}), "ep-as-dp")


def test_experts_that_take_no_factors_are_refused() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(4, 3, 2))

    model: Any = get_peft_model(
        nn.ModuleDict({"experts": Stack()}), LoraConfig(r=2, target_modules=[], target_parameters=["experts.up_proj"])
    )
    with fake_rank(0, 2), pytest.raises(ValueError, match=r"experts must adapt experts .* got Stack.up_proj"):
        parallelize(model, Mesh({"expert": 2}), "ep-as-dp", allow_unused=True)


def test_an_optimizer_made_before_parallelize_is_refused() -> None:
    model = adapted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def check() -> None:
        parallelize(model, Mesh({"expert": 2}), "ep-as-dp")
        with pytest.raises(
            RuntimeError, match=r"SGD must be made after parallelize: it holds the replaced .*lora_A.default.weight"
        ):
            optimizer.step()

    run_ranks(check, 2)
