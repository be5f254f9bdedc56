"""`quantize_experts`: models of this library and of transformers, with adapters, in little memory."""

import sys
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import maxmoe
from maxmoe import MoE, MoEConfig, ZeroComputation, quantize_experts
from maxmoe.quantization import (
    FORMATS,
    QuantizedStack,
    QuantizedWeight,
    dequantize_experts,
    quantize,
    state_with_stacks,
)

pytest.importorskip("transformers")

import maxmoe.integrations.transformers  # registers "maxmoe"
from support import programs, small_models
from support.slow_cases import by_default

each_format = pytest.mark.parametrize("format", FORMATS)
CONFIG = MoEConfig(hidden_size=48, intermediate_size=40, num_experts=4, top_k=2, num_shared_experts=1)


def layer(**options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(maxmoe.MoEConfig(**{**vars(CONFIG), **options})).requires_grad_(False)


def expert_weights(model: nn.Module) -> dict[str, Any]:
    stacks = {name: weight for name, weight in state_with_stacks(model).items() if weight.dim() == 3}
    others = ("lora", "conv", "shared_experts")
    return {name: parameter for name, parameter in stacks.items() if not any(other in name for other in others)}


@each_format
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gated": False, "shared_expert_gate": True, "expert_bias": True},
        {"latent_size": 24, "zero_computation": ZeroComputation(copy=2, constant=1)},
    ],
)
def test_moe_layer(format: str, options: dict[str, Any]) -> None:
    """The outputs and the gradient of the input equal those with dequantized weights, to the bit."""
    model = layer(**options)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    quantize_experts(model, format)
    names = {f"experts.{name}" for name in ("gate_proj", "up_proj", "down_proj") if f"experts.{name}" in before}
    weights = state_with_stacks(model)
    assert {name for name, weight in weights.items() if isinstance(weight, QuantizedWeight)} == names
    for name, weight in weights.items():
        expected = quantize(before[name], format).dequantize() if name in names else before[name]
        assert torch.equal(weight.dequantize() if name in names else weight, expected)
    x = torch.randn(11, 48, requires_grad=True)
    got = model(x).hidden_states
    (gradient,) = torch.autograd.grad(got.square().sum(), x)
    dequantize_experts(model)
    expected = model(x).hidden_states
    assert torch.equal(got, expected)
    assert torch.equal(gradient, torch.autograd.grad(expected.square().sum(), x)[0])
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and not any(parameter.requires_grad for parameter in after.values())
    assert all(parameter.is_contiguous() for parameter in after.values())


MODELS = [name for name in small_models.STANDARD_MODELS if name not in small_models.CONVERTED_ONLY]


@pytest.mark.parametrize("name", by_default(MODELS, ["mixtral", "gpt_oss", "llama4", "qwen2_moe"]))
def test_models_of_transformers(name: str) -> None:
    """Matrices [out, in] and [in, out]: blocks lie along the inputs in both."""
    model = small_models.model_of(name).requires_grad_(False)
    model.set_experts_implementation("maxmoe")
    before = {name: parameter.clone() for name, parameter in expert_weights(model).items()}
    quantize_experts(model, "mxfp4")
    is_first_in = name in ("gpt_oss", "llama4")
    assert before and expert_weights(model).keys() == before.keys()
    for key, weights in before.items():
        got: Any = model.get_submodule(key)
        expected = quantize(weights if is_first_in else weights.mT, "mxfp4")
        assert isinstance(got, QuantizedStack) and got.shape == weights.shape and got.is_transposed == is_first_in
        assert torch.equal(got.codes, expected.codes) and torch.equal(got.scales, expected.scales)
    got_outputs = outputs(model)
    dequantize_experts(model)
    assert all(torch.equal(one, other) for one, other in zip(got_outputs, outputs(model), strict=True))


def outputs(model: nn.Module) -> list[Tensor]:
    """The outputs of the sparse blocks."""
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))
    computed = [
        block(x, torch.arange(12)) if getattr(block, "is_hash", False) else block(x)
        for block in model.modules()
        if isinstance(getattr(block, "experts", None), nn.Module)
    ]
    return [each[0] if isinstance(each, tuple) else each for each in computed]


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    options: Any = {"init_lora_weights": False, "target_modules": []}
    return get_peft_model(model, LoraConfig(r=3, target_parameters=list(expert_weights(model)), **options))


@pytest.mark.parametrize(
    ("name", "is_adapted_first"), [("mixtral", False), ("gpt_oss", True), ("llama4", False), ("qwen2_moe", True)]
)
def test_adapters_of_peft(name: str, is_adapted_first: bool) -> None:
    """Adapters added before or after: their gradients equal those beside dequantized weights, to the bit."""
    whole = small_models.model_of(name).requires_grad_(False)
    whole.set_experts_implementation("maxmoe")
    model: Any = nn.Sequential(*small_models.blocks_of(whole).values())  # PEFT warns of a model of this version
    if is_adapted_first:
        model = adapted(model)
        quantize_experts(model, "int4", group_size=32)
    else:
        quantize_experts(model, "int4", group_size=32)
        model = adapted(model)

    def gradients() -> list[Tensor]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [*torch.autograd.grad(sum(output.square().sum() for output in outputs(model)), trained)]

    assert any(isinstance(module, QuantizedWeight) for module in model.modules())
    got, with_adapters = gradients(), outputs(model)
    with pytest.raises(RuntimeError, match=r"int4: keep it beside them, quantize the sum with maxmoe.convert.quan"):
        model.merge_adapter()
    dequantize_experts(model)
    assert got and all(torch.equal(one, other) and one.any() for one, other in zip(got, gradients(), strict=True))
    for one, other in zip(outputs(model.merge_and_unload()), with_adapters, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_averages_of_a_model_with_adapters() -> None:
    """The factors are averaged; torch would average and round the codes, which must stay the model's."""
    config = MoEConfig(hidden_size=64, intermediate_size=32, num_experts=4, top_k=2)
    layer = MoE(config, dtype=torch.float32).requires_grad_(False)
    quantize_experts(layer, "int4")
    lora = LoraConfig(r=2, target_modules=[], target_parameters=["experts.up_proj"], init_lora_weights=False)
    model = get_peft_model(nn.Sequential(layer), lora)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    factors = {name: each for name, each in model.named_parameters() if each.requires_grad}
    expected: dict[str, Tensor] = {}
    for step in range(3):
        for name, factor in factors.items():
            nn.init.constant_(factor, step + 1)
            expected[name] = 0.9 * expected[name] + 0.1 * factor.detach() if step else factor.detach().clone()
        averaged.update_parameters(model)
    found = dict(averaged.module.named_parameters())
    for name, factor in expected.items():
        torch.testing.assert_close(found[name].detach(), factor)
    quantized = {name for name in found if "codes" in name or "scales" in name}
    assert len(quantized) == 6 and all(torch.equal(found[name], model.get_parameter(name)) for name in quantized)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # a warning of the compiler
def test_compile() -> None:
    """A single graph, in which stacks are traced as their codes and scales."""
    model = layer()
    quantize_experts(model, "mxfp4")
    x = torch.randn(11, 48, requires_grad=True)
    outcomes = []
    for module in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        output = module(x).hidden_states
        outcomes.append((output, *torch.autograd.grad(output.square().sum(), x)))
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def test_models_that_cannot_be_quantized() -> None:
    with pytest.raises(ValueError, match=r"^the model must have quantized weights, got none in MoE$"):
        dequantize_experts(layer())
    with pytest.raises(ValueError, match="the model must have experts that maxmoe computes, got none"):
        quantize_experts(nn.Linear(2, 2), "mxfp4")
    with pytest.raises(ValueError, match="the model must have experts that maxmoe computes, got none"):
        quantize_experts(small_models.model_of("mixtral").requires_grad_(False), "mxfp4")
    model = nn.Sequential(layer(), layer())
    model[1].experts.down_proj.requires_grad_()
    with pytest.raises(ValueError, match=r"1.experts.down_proj must be frozen, .*, got requires_grad=True"):
        quantize_experts(model, "mxfp4")
    assert not any(isinstance(module, QuantizedWeight) for module in model.modules())
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"0.experts.gate_proj: format must be one of"):
        quantize_experts(model, "mxfp5")
    model[1].experts.up_proj[2, 3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"1.experts.up_proj: weights must be finite in float32, got nan"):
        quantize_experts(model, "mxfp4")
    with pytest.raises(ValueError, match=r"0.experts.gate_proj must not be quantized yet, got mxfp4"):
        quantize_experts(model, "nf4")


def test_dense_experts() -> None:
    model = layer(implementation="dense")
    quantize_experts(model, "mxfp4")
    with pytest.raises(ValueError, match=r"implementation='dense' computes with ordinary tensors, .* as mxfp4"):
        model(torch.randn(8, 48))


PEAK = """
import resource, torch, maxmoe
torch.set_num_threads(1)
config = maxmoe.MoEConfig(hidden_size=1024, intermediate_size=1024, num_experts=24, top_k=2)
model = maxmoe.MoE(config, dtype=torch.bfloat16).requires_grad_(False)  # three stacks
small = maxmoe.MoE(maxmoe.MoEConfig(hidden_size=64, intermediate_size=64, num_experts=2, top_k=1))
maxmoe.quantize_experts(small.requires_grad_(False), "mxfp4")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
maxmoe.quantize_experts(model, "mxfp4")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
@pytest.mark.slow
def test_peak_memory_is_the_model_and_one_quantized_stack() -> None:
    more = int(programs.printed(programs.python(PEAK))) * 1024
    stack = 24 * 1024 * 1024 * 2
    assert more < 0.27 * stack + 2 * stack / 24 + 48 * 2**20, f"{more / 2**20:.0f} MiB"


def test_merged_adapters_are_refused() -> None:
    """PEFT could not subtract them again, and would add them twice."""
    model = adapted(nn.Sequential(layer()))
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"experts must have no merged adapters, got \['default'\]: call"):
        quantize_experts(model, "int8")
    model.unmerge_adapter()
    quantize_experts(model, "int8")


def test_tied_experts_stay_tied() -> None:
    model = nn.Sequential(layer(), layer())
    for name, parameter in list(model[0].experts.named_parameters()):
        setattr(model[1].experts, name, parameter)
    quantize_experts(model, "int8")
    weights = dict(model[1].experts.named_children())
    assert len(weights) == 3 and all(weights[name] is weight for name, weight in model[0].experts.named_children())
    assert len(list(model.parameters())) == len(list(model[0].parameters())) + 4  # router and shared expert
    dequantize_experts(model)
    assert len(list(model.parameters())) == len(list(model[0].parameters())) + 4
