"""LoRA of PEFT beside experts, through `target_parameters`: the values of PEFT, and no sum of weights and adapters."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn

pytest.importorskip("transformers")

from maxmoe import MoE
from maxmoe.adapters import _peft as connection
from maxmoe.adapters import share_outer_factors
from maxmoe.adapters.peft import wrappers_of
from support.adapted import adapted, adapted_layer, trained
from support.moe_layers import EVERYTHING, make, tokens
from support.operator_calls import assert_near
from support.threads import in_threads
from support.transformers_experts import families, routed, small

EXPERTS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
EACH = ("router.weight", *EXPERTS, *(f"shared_{name}" for name in EXPERTS))


# Layers of maxmoe


def test_merged_it_is_the_layer_again() -> None:
    layer = make(load_balance_loss_weight=0.3, **EVERYTHING)
    x, names = tokens(layer), set(layer.state_dict())
    without = layer(x).hidden_states
    model = adapted(layer, EACH)
    expected, aux_loss = model(x), model.base_model.model.inner(x).aux_loss
    merged = model.merge_and_unload().inner
    assert type(merged) is MoE and set(merged.state_dict()) == names
    torch.testing.assert_close(merged(x).hidden_states, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged(x).aux_loss, aux_loss, rtol=1e-12, atol=1e-12)
    assert (expected - without).abs().max() > 1e-3


def test_the_layer_around_the_adapters_works_as_before() -> None:
    layer = make(correction_bias_update_rate=0.25, **EVERYTHING)
    x = tokens(layer)
    bias = layer.router.score_correction_bias.clone()
    adapted(layer, EACH)
    layer.update_correction_bias(layer(x).stats.tokens_per_expert)
    assert not torch.equal(layer.state_dict()["router.base_layer.score_correction_bias"], bias)
    assert layer.declaration == MoE(layer.config, device="meta").declaration
    with pytest.raises(
        ValueError, match=r"^x must have the dtype of the parameters \(torch.float64\) outside of autoc"
    ):
        layer(x.float())


def test_bfloat16_with_adapters_in_float32() -> None:
    layer = make(torch.bfloat16, **EVERYTHING)
    model = adapted(layer, EACH)
    for parameter in model.parameters():
        parameter.data = parameter.to(torch.float32 if parameter.requires_grad else torch.bfloat16)
    model(tokens(layer)).sum().backward()
    assert all(matrix.grad.dtype == torch.float32 and matrix.grad.any() for matrix in trained(model).values())


def test_the_active_copy_of_a_saved_router_is_balanced() -> None:
    layer = make(score_function="sigmoid", score_correction_bias=True, correction_bias_update_rate=0.25)
    model = adapted_layer(layer, modules_to_save=["router"])
    before = {name: value.clone() for name, value in model.state_dict().items() if "correction_bias" in name}
    layer.update_correction_bias(layer(tokens(layer)).stats.tokens_per_expert)
    changed = {name for name, value in model.state_dict().items() if name in before and not value.equal(before[name])}
    assert changed and all("modules_to_save.default" in name for name in changed)


# Experts of every family of transformers, with the family's own code and with maxmoe

CLASSES = {c.__name__: c for model in families.models() for c in families.experts_classes(model)}
# The code of these families computes partly in float32.
FLOAT32_INSIDE = {"BeamExperts", "Inkling2Experts", "Inkling2LoopExperts", "OpenAIPrivacyFilterExperts"}


def projections(experts: Any) -> list[str]:
    return ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]


def outcome(model: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of the inputs and of the factors."""
    hidden_states, index, weights = inputs
    hidden_states, weights = hidden_states.detach().requires_grad_(), weights.detach().requires_grad_()
    out = model(hidden_states, index, weights)
    along = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out.dtype)
    gradients = torch.autograd.grad(out, (hidden_states, weights, *trained(model).values()), along)
    return {"output": out.detach(), **dict(zip(("hidden_states", "weights", *trained(model)), gradients, strict=True))}


@pytest.mark.parametrize("experts_class", CLASSES.values(), ids=CLASSES)
def test_equals_peft_with_the_code_of_the_family(experts_class: type[nn.Module]) -> None:
    experts: Any = small(experts_class)
    model, inputs = adapted(experts, projections(experts)), routed(torch.float64)
    experts.config._experts_implementation = "eager"
    expected = outcome(model, inputs)
    assert len(expected) == 7 and all(value.any() for value in expected.values())
    experts.config._experts_implementation = "maxmoe"
    got = outcome(model, inputs)
    for name, value in expected.items():
        assert_near(got[name], value, 2e-6 if experts_class.__name__ in FLOAT32_INSIDE else 1e-10, name)
    assert_near(model.merge_and_unload()(*inputs), got["output"], 1e-12, "merged")


# PEFT's ways of using adapters


@pytest.fixture(params=["MixtralExperts", "GptOssExperts", "maxmoe.MoE"])
def model_and_inputs(request: pytest.FixtureRequest) -> tuple[PeftModel, tuple[Any, ...]]:
    """A model whose inputs are the same in each call."""
    if request.param == "maxmoe.MoE":
        layer = make()
        return adapted_layer(layer), (tokens(layer),)
    experts: Any = small(CLASSES[request.param])
    experts.config._experts_implementation = "maxmoe"
    return adapted(experts, projections(experts)), routed(torch.float64)


one_of_each_kind = pytest.mark.parametrize("model_and_inputs", ["GptOssExperts", "maxmoe.MoE"], indirect=True)


@contextmanager
def own_way() -> Iterator[None]:
    """PEFT adds its product to the weights, as it does without this library."""
    with patch.object(connection, "takes", lambda module, parameter: False):
        yield


def assert_same_both_ways(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """Return the output; compare it and the gradients of everything that is trained."""
    leaves = trained(model)

    def values() -> tuple[Tensor, ...]:
        output = model(*inputs)
        gradients = torch.autograd.grad(output.square().mean(), [*leaves.values()]) if leaves else ()
        return output, *gradients

    got = values()
    with own_way():
        expected = values()
    for name, one, other in zip(("output", *leaves), got, expected, strict=True):
        assert_near(one, other, 1e-10, name)
    return got[0]


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")  # PEFT looks for modules
@pytest.mark.parametrize(
    ("options", "lora"),
    [
        (EVERYTHING, {}),
        ({"implementation": "dense"}, {}),
        ({}, {"use_rslora": True}),
        ({}, {"rank_pattern": {"experts.down_proj": 5}}),
        ({}, {"modules_to_save": ["router"]}),
    ],
    ids=["everything", "dense", "rslora", "ranks", "modules to save"],
)
def test_options(options: dict[str, Any], lora: dict[str, Any]) -> None:
    layer = make(**options)
    x, plain, model = tokens(layer), adapted_layer(copy.deepcopy(layer)), adapted_layer(layer, **lora)
    got = assert_same_both_ways(model, (x,))
    assert any(name.startswith("base_model.model.inner.router") for name in trained(model)) == (
        "modules_to_save" in lora
    )
    assert torch.allclose(got, plain(x)) == (not {"use_rslora", "rank_pattern"} & lora.keys())


def test_several_adapters(model_and_inputs: tuple[PeftModel, tuple[Any, ...]]) -> None:
    model, inputs = model_and_inputs
    first = assert_same_both_ways(model, inputs)
    targets = list(model.peft_config["default"].target_parameters)  # type: ignore[attr-defined]
    config = LoraConfig(r=2, lora_alpha=7, target_parameters=targets, target_modules=[], init_lora_weights=False)
    model.add_adapter("second", config)
    model.to(torch.float64)
    model.set_adapter("second")
    second = assert_same_both_ways(model, inputs)
    model.base_model.set_adapter(["default", "second"])
    both = assert_same_both_ways(model, inputs)
    with model.disable_adapter():
        neither = assert_same_both_ways(model, inputs)
    outputs = (first, second, both, neither)
    assert all(not torch.allclose(one, other) for i, one in enumerate(outputs) for other in outputs[:i])


@pytest.mark.parametrize(
    ("part", "use_reentrant"), [("model", False), ("inner wrapper", True), ("experts", False), ("experts", True)]
)
def test_activation_checkpointing(
    model_and_inputs: tuple[PeftModel, tuple[Any, ...]], part: str, use_reentrant: bool
) -> None:
    """A part alone has the factors that the wrappers around it had handed over for its forward."""
    model, inputs = model_and_inputs
    *_, (_, wrapper) = wrappers_of(model)
    module: Any = {"model": model, "inner wrapper": wrapper, "experts": wrapper.get_base_layer()}[part]
    inputs = (inputs[0].detach().requires_grad_(), *inputs[1:])
    model(*inputs).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in trained(model).values()]
    model.zero_grad()
    module.forward = partial(torch.utils.checkpoint.checkpoint, module.forward, use_reentrant=use_reentrant)
    model(*inputs).square().sum().backward()
    for (name, parameter), gradient in zip(trained(model).items(), expected, strict=True):
        assert_near(parameter.grad, gradient, 1e-12, name)


@one_of_each_kind
def test_compiled(model_and_inputs: tuple[PeftModel, tuple[Any, ...]]) -> None:
    model, inputs = model_and_inputs
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert_near(compiled(*inputs), model(*inputs), 1e-12, "output")
    compiled(*inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in trained(model).values())


@one_of_each_kind
def test_two_threads(model_and_inputs: tuple[PeftModel, tuple[Any, ...]]) -> None:
    model, inputs = model_and_inputs

    def calls(scale: float) -> list[Tensor]:
        results = []
        for number in range(100):
            output = model(inputs[0] * (scale + number), *inputs[1:])
            results += [output.detach(), *torch.autograd.grad(output.square().mean(), [*trained(model).values()])]
        return results

    expected = calls(0.5), calls(2.0)
    for got, alone in zip(in_threads(lambda: calls(0.5), lambda: calls(2.0)), expected, strict=True):
        assert all(map(torch.equal, got, alone))


def test_autocast(model_and_inputs: tuple[PeftModel, tuple[Any, ...]]) -> None:
    model, inputs = model_and_inputs
    model = model.to(torch.float32)
    inputs = tuple(t.float() if t.is_floating_point() else t for t in inputs)
    expected = model(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(*inputs)
    assert_near(got.float(), expected, 0.05, "output")
    got.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in trained(model).values())


# Factors that all experts share


def as_new(model: PeftModel) -> PeftModel:
    """An adapter whose B are zero."""
    for name, factor in model.named_parameters():
        factor.data.mul_(0 if "lora_B" in name else 1)
    return model


def test_shared_factors_have_the_sum_of_the_gradients(tmp_path: Path) -> None:
    """They are as copies for each expert, which files have."""
    shared, copies = adapted_layer(make()), adapted_layer(make())
    inputs = (tokens(make()),)
    share_outer_factors(as_new(shared))
    for factor in trained(shared).values():
        nn.init.normal_(factor, std=0.3)
    copies.load_state_dict(shared.state_dict())
    for model in (shared, copies):
        model(*inputs).square().sum().backward()
    for (name, factor), of_each in zip(trained(shared).items(), trained(copies).values(), strict=True):
        wrapper, expected = shared.get_submodule(name.rpartition(".lora_")[0]), of_each.grad
        if ("lora_A" in name) != (wrapper.parameter_name == "down_proj"):
            dims = (0, (-1, 3)) if "lora_A" in name else (1, (3, -1))
            expected = expected.unflatten(*dims).sum(0 if "lora_A" in name else 2)
        assert_near(factor.grad, expected, 1e-12, name)
    output = assert_same_both_ways(shared, inputs)
    shared.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copies.unload(), tmp_path).to(torch.float64)
    share_outer_factors(loaded)
    assert_near(loaded(*inputs), output, 1e-12, "loaded")
    assert_near(shared.merge_and_unload()(*inputs), output, 1e-10, "merged")


def test_shared_factors_of_adapters_that_differ() -> None:
    model = adapted_layer(make())
    with pytest.raises(
        ValueError, match="the 6 experts of a trained adapter must have one lora_B for down_proj, got dif"
    ):
        share_outer_factors(model)
    with pytest.raises(ValueError, match="model must have the adapter 'other' beside parameters of experts, got none"):
        share_outer_factors(model, "other")
    share_outer_factors(as_new(model))
    different = adapted_layer(make()).state_dict()
    with pytest.raises(RuntimeError, match="must be equal for all experts, which share it"):
        model.load_state_dict(different)
