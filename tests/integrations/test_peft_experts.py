"""Adapters of PEFT beside experts: their factors go to the operators, and the weights are not copied."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from maxmoe import MoE
from maxmoe.adapters import _peft as connection
from maxmoe.adapters.peft import wrappers_of
from support.moe_layers import EVERYTHING, make, tokens
from support.operator_calls import assert_near
from support.threads import in_threads
from support.transformers_experts import families, routed, small

CLASSES = {c.__name__: c for model in families.models() for c in families.experts_classes(model)}
each_class = pytest.mark.parametrize("experts_class", CLASSES.values(), ids=CLASSES)


# The code of these families computes partly in float32.
FLOAT32_INSIDE = {"BeamExperts", "Inkling2Experts", "Inkling2LoopExperts", "OpenAIPrivacyFilterExperts"}


class Block(nn.Module):
    """A model around the experts, as PEFT needs it."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *inputs: Any) -> Any:
        return self.experts(*inputs)


def projections(experts: Any) -> list[str]:
    return ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]


def adapted(experts: Any, names: list[str], **options: Any) -> PeftModel:
    options = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, "target_modules": []} | options
    torch.manual_seed(4)
    model = get_peft_model(Block(experts), LoraConfig(target_parameters=[f"experts.{n}" for n in names], **options))
    return model.to(torch.float64)


def outcome(model: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of the inputs and of the factors."""
    hidden_states, index, weights = inputs
    hidden_states, weights = hidden_states.detach().requires_grad_(), weights.detach().requires_grad_()
    out = model(hidden_states, index, weights)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    along = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out.dtype)
    gradients = torch.autograd.grad(out, (hidden_states, weights, *trained.values()), along)
    return {"output": out.detach(), **dict(zip(("hidden_states", "weights", *trained), gradients, strict=True))}


class LargeOutputs(TorchDispatchMode):
    """Operators whose output is as large as a stack of matrices."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        views = ("detach", "view", "transpose", "permute", "alias", "t", "slice", "select", "expand", "_unsafe_view")
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor) and tensor.numel() >= self.size and function._opname not in views:
                self.found.append(str(function))
        return out


# Families of transformers


@each_class
def test_equals_peft_with_the_code_of_the_family(experts_class: type[nn.Module]) -> None:
    experts: Any = small(experts_class)
    model = adapted(experts, projections(experts))
    inputs = routed(torch.float64)
    experts.config._experts_implementation = "eager"
    expected = outcome(model, inputs)
    assert len(expected) == 7 and all(value.any() for value in expected.values())
    experts.config._experts_implementation = "maxmoe"
    got = outcome(model, inputs)
    for name, value in expected.items():
        assert_near(got[name], value, 2e-6 if experts_class.__name__ in FLOAT32_INSIDE else 1e-10, name)


@each_class
def test_forms_no_sum_of_weights_and_adapters(experts_class: type[nn.Module]) -> None:
    experts: Any = small(experts_class)
    model = adapted(experts, projections(experts), r=1)
    experts.config._experts_implementation = "maxmoe"
    smallest = min(getattr(experts, name).numel() for name in projections(experts))
    with LargeOutputs(smallest) as operators:
        outcome(model, tuple(t[:2] for t in routed(torch.float64)))
    # Parameters may be copied by the family's own gate or by test code, but none has the size of the experts.
    assert not operators.found


def test_equals_merged_weights() -> None:
    experts: Any = small(CLASSES["GptOssExperts"])
    experts.config._experts_implementation = "maxmoe"
    model = adapted(experts, projections(experts))
    inputs = routed(torch.float64)
    expected = model(*inputs)
    merged = model.merge_and_unload()
    assert merged.experts is experts
    assert_near(merged(*inputs), expected, 1e-12, "output")


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


class Layer(nn.Module):
    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.moe = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x).hidden_states


EXPERTS = ["moe.experts.gate_proj", "moe.experts.up_proj", "moe.experts.down_proj"]


def adapted_layer(layer: MoE, **options: Any) -> PeftModel:
    options = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, "target_modules": []} | options
    torch.manual_seed(4)
    return get_peft_model(Layer(layer), LoraConfig(target_parameters=EXPERTS, **options)).to(torch.float64)


@contextmanager
def own_way() -> Iterator[None]:
    """PEFT adds its product to the weights, as it does without this library."""
    with patch.object(connection, "takes", lambda module, parameter: False):
        yield


def assert_same_both_ways(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    got = model(*inputs)
    with own_way():
        expected = model(*inputs)
    assert_near(got, expected, 1e-10, "output")
    return got


def targets(model: PeftModel) -> list[str]:
    return list(model.peft_config["default"].target_parameters)


def test_several_adapters(model_and_inputs: tuple[PeftModel, tuple[Any, ...]]) -> None:
    model, inputs = model_and_inputs
    first = assert_same_both_ways(model, inputs)
    config = LoraConfig(r=2, lora_alpha=7, target_parameters=targets(model), target_modules=[], init_lora_weights=False)
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


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")  # PEFT looks for modules
@pytest.mark.parametrize("options", [{"use_rslora": True}, {"rank_pattern": {"experts.down_proj": 5}}], ids=str)
def test_options_of_lora(options: dict[str, Any]) -> None:
    model, plain = adapted_layer(make(), **options), adapted_layer(make())
    x = tokens(plain.base_model.model.moe)
    got = assert_same_both_ways(model, (x,))
    assert not torch.allclose(got, plain(x))


def test_modules_to_save() -> None:
    model = adapted_layer(make(), modules_to_save=["router"])
    x = tokens(make())
    assert_same_both_ways(model, (x,))
    model(x).sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert any("router" in name for name in trained) and any("lora_B" in name for name in trained)


def test_saved_and_loaded(model_and_inputs: tuple[PeftModel, tuple[Any, ...]], tmp_path: Path) -> None:
    model, inputs = model_and_inputs
    expected = model(*inputs)
    model.save_pretrained(tmp_path)
    base = model.unload()
    with pytest.raises(AssertionError):
        assert_near(base(*inputs), expected, 1e-3, "output")
    loaded = PeftModel.from_pretrained(base, tmp_path).to(torch.float64)
    assert torch.equal(loaded(*inputs), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("part", ["model", "inner wrapper", "experts"])
def test_activation_checkpointing(
    model_and_inputs: tuple[PeftModel, tuple[Any, ...]], part: str, use_reentrant: bool
) -> None:
    """A part alone has the factors that the wrappers around it had handed over for its forward."""
    model, inputs = model_and_inputs
    *_, (_, wrapper) = wrappers_of(model)
    module: Any = {"model": model, "inner wrapper": wrapper, "experts": wrapper.get_base_layer()}[part]
    inputs = (inputs[0].detach().requires_grad_(), *inputs[1:])
    parameters = [p for p in model.parameters() if p.requires_grad]
    model(*inputs).square().sum().backward()
    expected = [p.grad.clone() for p in parameters]
    model.zero_grad()
    module.forward = partial(torch.utils.checkpoint.checkpoint, module.forward, use_reentrant=use_reentrant)
    model(*inputs).square().sum().backward()
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert_near(parameter.grad, gradient, 1e-12, "gradient")


@pytest.mark.sampled(2)
def test_compiled(model_and_inputs: tuple[PeftModel, tuple[Any, ...]]) -> None:
    model, inputs = model_and_inputs
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert_near(compiled(*inputs), model(*inputs), 1e-12, "output")
    compiled(*inputs).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.sampled(2)
def test_two_threads(model_and_inputs: tuple[PeftModel, tuple[Any, ...]]) -> None:
    model, inputs = model_and_inputs
    trained = [p for p in model.parameters() if p.requires_grad]

    def calls(scale: float) -> list[Tensor]:
        results = []
        for number in range(100):
            output = model(inputs[0] * (scale + number), *inputs[1:])
            results += [output.detach(), *torch.autograd.grad(output.square().mean(), trained)]
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
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in model.parameters() if p.requires_grad)


def test_every_option_of_the_layer() -> None:
    layer = make(**EVERYTHING)
    assert_same_both_ways(adapted_layer(layer), (tokens(layer),))


def test_dense_implementation() -> None:
    layer = make(implementation="dense")
    assert_same_both_ways(adapted_layer(layer), (tokens(layer),))
