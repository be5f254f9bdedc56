"""Adapters of PEFT beside experts on a mesh: saving, plans and errors; test_parallelize.py compares their training."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from maxmoe import MoE, MoEConfig, MoEFeedForward, StatsAccumulator
from maxmoe.adapters import factor_names, planned_copy, share_outer_factors
from maxmoe.optim import Matrix, Muon, parameter_groups
from maxmoe.parallel import Declaration, adapter_state_dict, logical_names, parallelize, token_sharding
from maxmoe.sharding import Mesh
from support.adapted import trained
from support.adapted_decoders import TARGETS, adapted
from support.parallel_decoder import BLOCK, MOE, batch, decoder, loss
from support.run_ranks import fake_rank, run_ranks


def test_factors_stay_on_the_rank_of_their_expert() -> None:
    with fake_rank(1, 2):
        model = parallelize(adapted(), Mesh({"expert": 2}), "ep-as-dp")
        shapes = [tuple(p.to_local().shape) for name, p in model.named_parameters() if name in factor_names(model)]  # type: ignore[attr-defined]
        assert shapes and all(shape[:2] == (MOE.num_experts // 2, 3) for shape in shapes)


class Stack(nn.Module):
    """Matrices [in, out], which PEFT calls transposed, or [out, in]."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        shape, names = ((4, 8), ("embed_moe", "mlp_moe")) if is_transposed else ((8, 4), ("mlp_moe", "embed_moe"))
        self.weight = nn.Parameter(torch.zeros(2, *shape))
        self.declaration = Declaration(logical_names={"weight": ("exp", *names)})


@pytest.mark.parametrize("is_transposed", [True, False])
def test_factors_have_the_names_of_inputs_and_outputs(is_transposed: bool) -> None:
    config = LoraConfig(r=3, target_parameters=["0.weight"], target_modules=[])
    model: Any = get_peft_model(nn.Sequential(Stack(is_transposed)), config)
    names = logical_names(planned_copy(model))
    ends = {name.split(".")[-3]: of_dims for name, of_dims in names.items() if "lora_" in name}
    assert ends == {"lora_A": ("exp", None, "embed_moe"), "lora_B": ("exp", None, "mlp_moe")}


# Saving


def test_adapters_are_saved_for_peft_and_loaded_on_another_mesh(tmp_path: Path) -> None:
    expected = {name: p.detach().clone() for name, p in adapted().named_parameters() if p.requires_grad}

    def save() -> None:
        model = parallelize(adapted(), Mesh({"fsdp": 2, "expert": 2}), "ep-as-dp")
        state_dict = adapter_state_dict(model)
        if dist.get_rank() == 0:
            model.save_pretrained(tmp_path, state_dict=state_dict)

    run_ranks(save, 4)
    loaded = PeftModel.from_pretrained(decoder(BLOCK), tmp_path, is_trainable=True).to(torch.float64)
    found = {name: p.detach() for name, p in loaded.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].float(), value.float()), name

    def load() -> None:
        model = PeftModel.from_pretrained(decoder(BLOCK), tmp_path, is_trainable=True).to(torch.float64)
        state_dict = adapter_state_dict(parallelize(model, Mesh({"expert": 2}), "ep-tp"))
        for name, value in expected.items():
            assert torch.equal(state_dict[name].float(), value.float()), name

    run_ranks(load, 2)


# Rank * num_experts equal to the hidden size: factors in another order would load without an error.
SQUARE = MoEConfig(
    hidden_size=16,
    intermediate_size=16,
    num_experts=4,
    top_k=2,
    score_function="sigmoid",
    score_correction_bias=True,
    correction_bias_update_rate=0.1,
)


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(MoEFeedForward(SQUARE))


def adapted_layer(name: str, **options: Any) -> PeftModel:
    config = LoraConfig(r=4, target_parameters=TARGETS, target_modules=[], init_lora_weights=False, **options)
    return get_peft_model(layer(), config, adapter_name=name)


@pytest.mark.parametrize("name", ["default", "lora_A", "lora_B"])
def test_adapters_of_any_name(name: str, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 16)
    with fake_rank(0, 1):
        model = parallelize(adapted_layer(name), Mesh({"expert": 1}), "ep-as-dp")
        model.save_pretrained(tmp_path, state_dict=adapter_state_dict(model))
    folder = tmp_path if name == "default" else tmp_path / name
    loaded = PeftModel.from_pretrained(layer(), folder, adapter_name=name)
    assert loaded(x).equal(adapted_layer(name)(x))


def test_shared_factors_are_saved_as_copies(tmp_path: Path) -> None:
    x, options = torch.randn(2, 3, 16), LoraConfig(r=4, target_parameters=TARGETS, target_modules=[])
    model: Any = get_peft_model(layer(), options)
    share_outer_factors(model)
    for factor in trained(model).values():
        nn.init.normal_(factor, std=0.3)
    expected = model(x)
    with fake_rank(0, 1):
        model = parallelize(model, Mesh({"expert": 1}), "ep-as-dp")
        sizes = {len(factor.to_local()) for name, factor in model.named_parameters() if name in factor_names(model)}
        assert sizes == {1, SQUARE.num_experts}
        model.save_pretrained(tmp_path, state_dict=adapter_state_dict(model))
    assert PeftModel.from_pretrained(layer(), tmp_path)(x).equal(expected)


def test_buffers_of_modules_that_are_saved_whole(tmp_path: Path) -> None:
    with fake_rank(0, 1):
        model = parallelize(adapted_layer("default", modules_to_save=["router"]), Mesh({"expert": 1}), "ep-as-dp")
        accumulator = StatsAccumulator(model)
        model(torch.randn(1, 13, 16)).square().mean().backward()
        accumulator.update()
        model.save_pretrained(tmp_path, state_dict=adapter_state_dict(model))
    (bias,) = (buffer for path, buffer in model.named_buffers() if "modules_to_save" in path)
    loaded = PeftModel.from_pretrained(layer(), tmp_path)
    (found,) = (buffer for path, buffer in loaded.named_buffers() if "modules_to_save" in path)
    assert found.any() and found.equal(bias)


# Plans and errors


# Stacks [r, in] and [r, out] of matrices [out, in] and [in, out].
FACTORS = {"*.lora_A.*": Matrix(-1), "*.lora_B.*": Matrix(-2)}


def trained_by_muon(mesh: Mesh) -> dict[str, torch.Tensor]:
    model, (tokens, targets) = parallelize(adapted(), mesh, "pure-fsdp"), batch()
    part = token_sharding(mesh, "pure-fsdp").slices(tokens.shape)
    optimizer = Muon(parameter_groups(model, FACTORS), lr=0.01, ns_dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(tokens[part]), targets[part]).backward()
        optimizer.step()
    return adapter_state_dict(model)


def test_muon_trains_whole_factors() -> None:
    with fake_rank(0, 1):
        expected = trained_by_muon(Mesh({"fsdp": 1}))
    before = {name: p for name, p in adapted().named_parameters() if p.requires_grad}
    assert expected.keys() == before.keys() and not any(expected[name].equal(p) for name, p in before.items())
    for factors in run_ranks(lambda: trained_by_muon(Mesh({"fsdp": 2})), 2):
        assert factors.keys() == expected.keys()
        for name, value in factors.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


def test_muon_takes_no_packed_factors() -> None:
    with pytest.raises(ValueError, match="in which PEFT packs the factors of all experts; maxmoe"):
        parameter_groups(adapted(), FACTORS)
    reasons = {choice.reason for choice in parameter_groups(adapted()).choices}
    assert reasons == {"low-rank factors of stacked matrices"}


def test_adapters_must_be_added_and_merged_before_parallelize() -> None:
    with fake_rank(0, 2):
        model = parallelize(adapted(), Mesh({"fsdp": 2}), "pure-fsdp")
        with pytest.raises(RuntimeError, match="'default' beside down_proj cannot be merged after parallelize"):
            model.merge_adapter()
        options: Any = {"target_modules": [], "target_parameters": TARGETS, "init_lora_weights": False}
        model.add_adapter("late", LoraConfig(r=2, **options))
        model.set_adapter("late")
        with pytest.raises(RuntimeError, match="'late' beside down_proj has been added after parallelize"):
            model(batch()[0])


def test_all_adapters_are_collected() -> None:
    """Also adapters of other modules, and adapters that are not active."""
    model: Any = nn.ModuleDict({"dense": nn.Linear(4, 4), "moe": MoE(MOE)})
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["dense"], target_parameters=TARGETS))
    model.add_adapter("second", LoraConfig(r=3, target_modules=["dense"], target_parameters=TARGETS))
    expected = {name: tuple(p.shape) for name, p in model.named_parameters() if "lora_" in name}
    with fake_rank(0, 2):
        found = adapter_state_dict(parallelize(model, Mesh({"expert": 2}), "ep-as-dp"))
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected


class Stacked(nn.Module):
    """Stacks that are no experts of maxmoe."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(4, 3, 2))


def of_two_dtypes() -> nn.Module:
    model = adapted()
    model.base_model.model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.float() if "lora_" in name else parameter.data
        parameter.requires_grad_("lora_" in name or "router.weight" in name)
    return model


def adapts(*parameters: str, model: nn.Module | None = None, modules: Sequence[str] = ()) -> nn.Module:
    options: Any = {"target_modules": [*modules], "target_parameters": [*parameters]}
    return get_peft_model(decoder(BLOCK) if model is None else model, LoraConfig(r=2, **options))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "axis", "message"),
    [
        (lambda: adapts("router.weight", *TARGETS), "expert", "must have no adapters around it, got ParamWrapper"),
        (lambda: adapts("experts.up_bias", *TARGETS), "expert", "must have no adapters around it, got ParamWrapper"),
        (lambda: adapts(*TARGETS, modules=["q_proj"]), "expert", "attention.q_proj has adapters around it"),
        (
            lambda: adapts("experts.up_proj", model=nn.ModuleDict({"experts": Stacked()})),
            "expert",
            "experts must adapt experts .* got Stacked.up_proj",
        ),
        (
            of_two_dtypes,
            "fsdp",
            "FSDP2 shards the trained parameters of .* must have one dtype, got torch.(float32|bfloat16) of ",
        ),
    ],
)
def test_adapters_that_are_refused(make: Callable[[], nn.Module], axis: str, message: str) -> None:
    model = make()
    before = dict(model.named_parameters())
    rules = "ep-as-dp" if axis == "expert" else "pure-fsdp"
    with fake_rank(0, 2), pytest.raises(ValueError, match=message):
        parallelize(model, Mesh({axis: 2}), rules, allow_unused=True)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
