"""MoE.from_transformers and MoE.to_transformers: the same numbers as the block, and the same bits back."""

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxmoe import MoE, presets
from maxmoe.convert.blocks import config_of_block, family_of_block
from support import memory, small_models
from support.sampling import by_default
from support.small_models import block_of

pytest.importorskip("transformers")

each_family = pytest.mark.parametrize("name", small_models.CONVERTED_MODELS)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in small_models.CONVERTED_MODELS} | {
    **{name: (name, {}) for name in small_models.SAME_LAYERS},
    "dbrx_not_normalised": ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": None}}),
    "qwen2_moe_normalised": ("qwen2_moe", {"norm_topk_prob": True}),
    "cohere2_moe_sigmoid": ("cohere2_moe", {"expert_selection_fn": "sigmoid"}),
    "cohere2_moe_sum": (
        "cohere2_moe",
        {"expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum", "norm_topk_prob": False},
    ),
    "cohere2_moe_without_shared": ("cohere2_moe", {"num_shared_experts": 0}),
    "deepseek_v2_lite": ("deepseek_v2", {"topk_method": "greedy"}),
    "kolibri1_normalised": ("kolibri1", {"norm_topk_prob": True}),
    "axk2_without_groups": ("axk2", {"n_group": None, "topk_group": None}),
    "deepseek_v3_not_normalised": ("deepseek_v3", {"norm_topk_prob": False}),
    "llama4_two_experts": ("llama4", {"num_experts_per_tok": 2}),
    "mixtral_gelu": ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}),
    "gpt_oss_small_limit": ("gpt_oss", {"swiglu_limit": 0.5}),
}


def run_block(block: nn.Module, x: Tensor) -> Tensor:
    output = block(x)
    return (output[0] if isinstance(output, tuple) else output).reshape(x.shape)


def run_layer(layer: nn.Module, x: Tensor) -> Tensor:
    hidden_states: Tensor = layer(x).hidden_states
    return hidden_states


def routing_of(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and experts of the block's router, in ascending order of experts."""
    if type(block).__name__ == "ZayaSparseMoeBlock":  # whose router hides the tokens that skip the layer
        scores = block.gate(x)[0].softmax(-1)
        experts = (scores + block.gate.balancing_biases).topk(1).indices
        return scores.gather(1, experts), experts
    outputs: list[Any] = []
    router = block.gate if hasattr(block, "gate") else block.router
    with router.register_forward_hook(lambda _router, _inputs, output: outputs.append(output)):
        block(x)
    if hasattr(block, "route_tokens_to_experts"):
        weights, experts = block.route_tokens_to_experts(*outputs)
    elif len(outputs[0]) > 2:
        _, weights, experts, *_ = outputs[0]
    else:  # Llama 4 gives the weights of all experts, 0 for those not chosen
        weights, experts = outputs[0][0].topk(block.top_k)
    if family_of_block(block).scales_sum:
        weights = weights * config_of_block(block).routed_scaling_factor
    order = experts.argsort(-1)
    return weights.gather(1, order), experts.gather(1, order)


@pytest.mark.parametrize(("name", "options"), VARIANTS.values(), ids=VARIANTS)
def test_layer_is_the_block(name: str, options: dict[str, Any]) -> None:
    block = block_of(name, **options)
    layer = MoE.from_transformers(copy.deepcopy(block))
    x = torch.randn(4, 50, 16)  # two rules for the groups agree for most tokens

    weights, experts = routing_of(block, x)
    routing = layer.router(x.flatten(0, 1))
    order = routing.experts.argsort(-1)
    assert torch.equal(routing.experts.gather(1, order), experts)
    torch.testing.assert_close(routing.weights.gather(1, order), weights, rtol=1e-5, atol=1e-6)

    cotangent = torch.randn_like(x)
    outputs, gradients = [], []
    for module, run in ((layer, run_layer), (block, run_block)):
        leaf = x.clone().requires_grad_()
        outputs.append(run(module, leaf))
        outputs[-1].backward(cotangent)
        gradients.append(leaf.grad)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@each_family
def test_gradients_are_those_of_the_block(name: str) -> None:
    """The gradients of our parameters, converted like weights, equal the gradients of the block."""
    block = block_of(name)
    layer = MoE.from_transformers(copy.deepcopy(block))
    x, cotangent = torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    run_layer(layer, x).backward(cotangent)
    run_block(block, x).backward(cotangent)
    expected = {key: parameter.grad for key, parameter in block.named_parameters() if parameter.requires_grad}
    carrier = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in layer.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    layer.to_transformers(carrier)
    carried = dict(carrier.named_parameters())
    for key, gradient in expected.items():
        torch.testing.assert_close(carried[key].detach(), gradient, rtol=1e-4, atol=1e-4)


@each_family
@pytest.mark.parametrize("dtype", by_default([torch.float32, torch.bfloat16, torch.float64], [torch.bfloat16]))
def test_round_trip_is_bitwise(name: str, dtype: torch.dtype) -> None:
    block = block_of(name).to(dtype).eval()
    for tensor in block.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, dtype=torch.float64))
    small_models.clear_unused_matrices(block)
    expected = copy.deepcopy(block.state_dict())
    layer = MoE.from_transformers(block)
    assert not layer.training
    assert all(tensor.is_meta for tensor in block.state_dict().values())
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    assert all(tensor.is_contiguous() for tensor in layer.state_dict().values())
    layer.to_transformers(block)
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    got = block.state_dict()
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype and got[key].is_contiguous()
        assert torch.equal(got[key], tensor), key


def test_to_another_block() -> None:
    """Conversion to a second block, on the meta device."""
    block = block_of("deepseek_v3")
    expected = copy.deepcopy(block.state_dict())
    other = block_of("deepseek_v3").to("meta")
    MoE.from_transformers(block).to_transformers(other)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in other.state_dict().items())


def test_correction_bias_stays_wide() -> None:
    block = block_of("deepseek_v3").bfloat16()
    layer = MoE.from_transformers(block)
    assert layer.router.score_correction_bias.dtype == torch.float32


def test_frozen_weights_stay_frozen() -> None:
    block = block_of("mixtral")
    block.experts.down_proj.requires_grad_(False)
    layer = MoE.from_transformers(block)
    frozen = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
    assert frozen == {"experts.down_proj"}
    layer.to_transformers(block)
    assert {name for name, parameter in layer.named_parameters() if not parameter.requires_grad} == frozen
    assert [name for name, parameter in block.named_parameters() if not parameter.requires_grad] == [
        "experts.down_proj"
    ]


@each_family
def test_trains_and_saves(name: str, tmp_path: Any) -> None:
    from safetensors.torch import save_file

    layer = MoE.from_transformers(block_of(name))
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")  # refuses shared memory
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    before = copy.deepcopy(layer.state_dict())
    run_layer(layer, torch.randn(4, 16, 16)).square().mean().backward()
    optimizer.step()
    still = [key for key, tensor in layer.named_parameters() if torch.equal(tensor, before[key])]
    assert not still


def test_memory() -> None:
    """Each conversion takes memory for one more tensor: gate and up of all experts."""
    block = block_of("qwen3_moe", hidden_size=512, moe_intermediate_size=256, num_experts=72)
    largest = block.experts.gate_up_proj.nbytes
    assert largest / 2 == block.experts.down_proj.nbytes > memory.SELF_CONTAINED  # gate alone, up alone and down
    with memory.at_most(largest):
        layer = MoE.from_transformers(block)
    with memory.at_most(largest):
        layer.to_transformers(block)


class OldBlock(nn.Module):
    """A list of experts and no config, as before transformers 5."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 6, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 10) for _ in range(6))


def changed(name: str, **attributes: Any) -> nn.Module:
    """A block whose config was changed after it was made."""
    block = block_of(name)
    for attribute, value in attributes.items():
        setattr(block.experts.config, attribute, value)
    return block


def with_module(name: str, **modules: nn.Module) -> nn.Module:
    block = block_of(name)
    for key, module in modules.items():
        setattr(block, key, module)
    return block


WRONG_BLOCKS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "old": (OldBlock, ("OldBlock", "5.20", "config")),
    "dense": (lambda: block_of("deepseek_v3").shared_experts, ("missing gate.weight", "up_proj.weight")),
    "lora": (
        lambda: with_module("mixtral", adapter=nn.Linear(2, 2)),
        ("MixtralSparseMoeBlock", "adapter.weight", "missing nothing"),
    ),
    "gone": (
        lambda: with_module("qwen2_moe", shared_expert=nn.Identity()),
        ("Qwen2MoeSparseMoeBlock", "missing shared_expert.gate_proj.weight"),
    ),
    "width": (
        lambda: changed("mixtral", intermediate_size=11),
        ("experts.gate_up_proj", "(6, 22, 16)", "(6, 20, 16)"),
    ),
    "experts": (lambda: changed("qwen3_moe", num_experts=7), ("gate.weight", "(7, 16)", "(6, 16)")),
    "family": (lambda: changed("mixtral", model_type="bert"), ("model_type", "'bert'")),
    "other_family": (lambda: changed("mixtral", model_type="minimax_m2"), ("missing e_score_correction_bias",)),
}


@pytest.mark.parametrize(("block", "words"), WRONG_BLOCKS.values(), ids=WRONG_BLOCKS)
def test_wrong_blocks(block: Any, words: tuple[str, ...]) -> None:
    module = block()
    with pytest.raises(ValueError, match="".join(f"(?=.*{re.escape(word)})" for word in words)):
        MoE.from_transformers(module)
    assert not any(tensor.is_meta for tensor in module.state_dict().values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 3}, ("top_k", "2", "3")),
        ({"normalization": "none"}, ("normalization", "'sum'", "'none'")),
        ({"num_experts": 8}, ("num_experts", "6", "8")),
    ],
    ids=str,
)
def test_wrong_layers(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    block = block_of("mixtral")
    layer = MoE(dataclasses.replace(presets.from_transformers(block.experts.config), **changes))
    with pytest.raises(ValueError, match="".join(f"(?=.*{re.escape(word)})" for word in words)):
        layer.to_transformers(block)
    assert not any(tensor.is_meta for tensor in [*layer.state_dict().values(), *block.state_dict().values()])


def test_what_is_of_the_training_may_differ() -> None:
    block = block_of("kimi_k2")
    config = presets.from_transformers(block.experts.config)
    MoE(dataclasses.replace(config, correction_bias_rule="quantile", correction_bias_update_rate=1.0)).to_transformers(
        block
    )
    block = block_of("mixtral")
    training = {"implementation": "dense", "load_balance_loss_weight": 3.0, "router_z_loss_weight": 1.0}
    MoE(dataclasses.replace(presets.from_transformers(block.experts.config), **training)).to_transformers(block)
    run_block(block, torch.randn(1, 3, 16))
