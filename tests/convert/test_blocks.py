"""MoE.from_transformers and MoE.to_transformers: the values of a family's block, and the same bits back."""

import copy
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import save

from maxmoe import MoE, parallelize, presets, quantize_experts
from maxmoe.convert.blocks import config_of_block
from maxmoe.convert.checkpoint import write_checkpoint
from maxmoe.nn import Router, Routing
from maxmoe.parallel import token_sharding
from maxmoe.sharding import Mesh
from support import memory
from support.messages import containing
from support.operator_calls import assert_near
from support.run_ranks import run_cases
from support.small_models import (
    CONVERTED_MODELS,
    SAME_LAYERS,
    WithoutFloat32,
    block_of,
    import_models,
)

# A family, and changes of its config.
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in [*CONVERTED_MODELS, *SAME_LAYERS]} | {
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
    "deepseek_v4_of_ids": ("deepseek_v4", {"layer": 1}),
    "zaya_with_a_state": ("zaya", {"layer": 1}),
}
# What the tables of tests/parallel do not have: norms after the sum and of tokens, two limits, ids, a state.
ON_RANKS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "axk1": ({}, "ep-tp", "auto"),
    "gemma4": ({}, "ep-tp", "auto"),
    "step3p7": ({}, "ep-as-dp", "least_loaded"),
    "deepseek_v4": ({"layer": 1}, "ep-as-dp", "ring_of_experts"),  # takes ids of the tokens
    "zaya": ({"layer": 1}, "ep-as-dp", "ragged_all_to_all"),  # takes a state
}
import_models(*ON_RANKS)
B, S = 4, 25  # two rules for the groups of a router agree for most tokens


@dataclass(frozen=True)
class Step:
    """Tokens ``(B, S, D)`` with a mask, and a block's results in float64; gradients by the names of our parameters."""

    block: nn.Module
    inputs: dict[str, Tensor]  # x, and the state of the router that the layer before has given
    mask: Tensor
    ids: Tensor | None
    cotangents: list[Tensor]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, preset: str, **options: Any) -> "Step":
        torch.manual_seed(0)
        block: Any = block_of(preset, **options).double()
        if preset == "axk2":  # then both experts of the group that is left out are selected, with a score of zero
            block.gate.e_score_correction_bias -= 2
        mask = torch.ones(B, S).bool()
        mask[0, :3], mask[2, 5:], mask[3] = False, False, False
        sizes = {"x": 16, "router_state": 6} if preset == "zaya" and block.gate.use_eda else {"x": 16}
        inputs = {
            name: torch.randn(B, S, size, dtype=torch.float64, requires_grad=True) for name, size in sizes.items()
        }
        carrier, ids = copy.deepcopy(block), torch.randint(32, (B, S)) if preset == "deepseek_v4" else None
        with WithoutFloat32():
            output = carrier(*inputs.values(), **({} if ids is None else {"input_ids": ids}))
            outputs = [*output] if preset == "zaya" else [output[0] if isinstance(output, tuple) else output]
            outputs[0] = outputs[0].reshape(B, S, 16)
            cotangents = [torch.randn_like(each) * mask.unsqueeze(2) for each in outputs]
            torch.autograd.backward(outputs, cotangents)
        for parameter in carrier.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = dict(MoE.from_transformers(carrier).named_parameters())
        gradients |= {name: leaf.grad for name, leaf in inputs.items()}
        by_name = zip(("hidden_states", "router_state"), outputs, strict=False)
        outputs = {name: each.detach() * mask.unsqueeze(2) for name, each in by_name}
        inputs = {name: leaf.detach() for name, leaf in inputs.items()}
        ids = ids if getattr(block, "is_hash", False) else None
        return cls(block, inputs, mask, ids, cotangents, outputs, gradients)

    def check(self, layer: MoE, part: Any = ...) -> None:
        """Take the step with a layer, on a mesh with this rank's part of the tokens, and compare all values."""
        inputs = {name: value[part].clone().requires_grad_() for name, value in self.inputs.items()}
        mask = self.mask[part]
        padded = {name: leaf.masked_fill(~mask.unsqueeze(2), float("nan")) for name, leaf in inputs.items()}
        ids = {} if self.ids is None else {"router_inputs": self.ids[part].masked_fill(~mask, -1)}
        output = layer(token_mask=mask, **padded, **ids)
        outputs = [getattr(output, name) for name in self.outputs]
        torch.autograd.backward(outputs, [cotangent[part] for cotangent in self.cotangents])
        for (name, expected), got in zip(self.outputs.items(), outputs, strict=True):
            assert_near(got.detach() * mask.unsqueeze(2), expected[part], 1e-12, name)
        assert not outputs[0][~mask].any()
        gradients: dict[str, Any] = {name: parameter.grad for name, parameter in layer.named_parameters()}
        gradients |= {name: leaf.grad for name, leaf in inputs.items()}
        assert gradients.keys() == self.gradients.keys()
        for name, expected in self.gradients.items():
            got, whole = gradients[name], expected[part] if name in inputs else expected
            assert_near(got.full_tensor() if isinstance(got, DTensor) else got, whole, 1e-12, name)


@pytest.mark.parametrize(("preset", "options"), BLOCKS.values(), ids=BLOCKS)
def test_layer_is_the_block(preset: str, options: dict[str, Any]) -> None:
    step = Step.of(preset, **options)
    step.check(MoE.from_transformers(step.block))


@pytest.mark.filterwarnings("ignore:.* of the parameters are whole")
def test_layer_on_ranks_is_the_block() -> None:
    steps = {preset: Step.of(preset, **options) for preset, (options, _, _) in ON_RANKS.items()}
    layers = {preset: MoE.from_transformers(step.block) for preset, step in steps.items()}

    def check(preset: str, rules: str, dispatch: Any) -> None:
        layer, step, mesh = copy.deepcopy(layers[preset]), steps[preset], Mesh({"expert": 2})
        parallelize(layer, mesh, rules, dispatch=dispatch)
        step.check(layer, token_sharding(mesh, rules).slices(step.mask.shape))

    run_cases(check, 2, [(preset, *strategy) for preset, (_, *strategy) in ON_RANKS.items()])


# Tensors


@pytest.mark.parametrize("name", CONVERTED_MODELS)
def test_round_trip_is_bitwise(name: str) -> None:
    block: Any = block_of(name).bfloat16().eval()
    for key, tensor in block.named_buffers():
        if key.endswith("correction_bias"):
            tensor.data = tensor.float()
    for tensor in block.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape))
    if name == "longcat_flash":  # matrices of gate and up for experts that compute nothing
        block.experts.gate_up_proj.detach()[block.experts.num_routed_experts :] = 0
    expected = copy.deepcopy(block.state_dict())
    layer = MoE.from_transformers(block)
    assert not layer.training
    assert all(tensor.is_meta for tensor in block.state_dict().values())
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    assert all(tensor.is_contiguous() for tensor in layer.state_dict().values())
    save(layer.state_dict())  # refuses shared memory
    layer.to_transformers(block)
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    got = block.state_dict()
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert got[key].dtype == tensor.dtype and got[key].is_contiguous() and torch.equal(got[key], tensor), key


def test_frozen_weights_stay_frozen() -> None:
    block = block_of("mixtral")
    block.experts.down_proj.requires_grad_(False)
    layer = MoE.from_transformers(block)
    layer.to_transformers(block)
    for module in (layer, block):
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        assert frozen == ["experts.down_proj"]


def test_memory() -> None:
    """Each conversion takes memory for one more tensor: gate and up of all experts."""
    block = block_of("qwen3_moe", hidden_size=512, moe_intermediate_size=256, num_experts=72)
    largest = block.experts.gate_up_proj.nbytes
    assert largest / 2 == block.experts.down_proj.nbytes > memory.SELF_CONTAINED  # gate alone, up alone and down
    with memory.at_most(largest):
        layer = MoE.from_transformers(block)
    with memory.at_most(largest):
        layer.to_transformers(block)


# Refusals


def changed(name: str, **changes: Any) -> nn.Module:
    """A block with other modules, or with another config than it was made of."""
    block = block_of(name)
    for key, value in changes.items():
        setattr(block if isinstance(value, nn.Module) else block.experts.config, key, value)
    return block


def assert_nothing_moved(*modules: nn.Module) -> None:
    assert not any(tensor.is_meta for module in modules for tensor in module.state_dict().values())


WRONG_BLOCKS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no config": (lambda: nn.Linear(2, 2), ("Linear", "5.20", "config")),
    "dense": (lambda: block_of("deepseek_v3").shared_experts, ("missing gate.weight", "up_proj.weight")),
    "lora": (lambda: changed("mixtral", adapter=nn.Linear(2, 2)), ("MixtralSparseMoeBlock", "adapter.weight")),
    "gone": (lambda: changed("qwen2_moe", shared_expert=nn.Identity()), ("missing shared_expert.gate_proj.weight",)),
    "width": (lambda: changed("mixtral", intermediate_size=11), ("gate_up_proj", "(6, 22, 16)", "(6, 20, 16)")),
    "experts": (lambda: changed("qwen3_moe", num_experts=7), ("gate.weight", "(7, 16)", "(6, 16)")),
    "family": (lambda: changed("mixtral", model_type="bert"), ("model_type", "'bert'")),
    "other_family": (lambda: changed("mixtral", model_type="minimax_m2"), ("missing e_score_correction_bias",)),
}


@pytest.mark.parametrize(("block", "words"), WRONG_BLOCKS.values(), ids=WRONG_BLOCKS)
def test_wrong_blocks(block: Any, words: tuple[str, ...]) -> None:
    module = block()
    with pytest.raises(ValueError, match=containing(*words)):
        MoE.from_transformers(module)
    assert_nothing_moved(module)


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
    with pytest.raises(ValueError, match=containing(*words)):
        layer.to_transformers(block)
    assert_nothing_moved(layer, block)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("kimi_k2", {"correction_bias_rule": "quantile", "correction_bias_update_rate": 1.0}),
        ("mixtral", {"implementation": "dense", "load_balance_loss_weight": 3.0, "router_z_loss_weight": 1.0}),
    ],
)
def test_what_is_of_the_training_may_differ(name: str, training: dict[str, Any]) -> None:
    block = block_of(name)
    MoE(dataclasses.replace(presets.from_transformers(block.experts.config), **training)).to_transformers(block)
    assert_nothing_moved(block)


class Reversed(Router):
    """A custom router with the weights of `Router`."""

    def forward(self, x: Tensor, token_mask: Tensor | None = None, experts: Tensor | None = None) -> Routing:
        return super().forward(-x, token_mask, experts)


def gated_by_cosine(gate: Tensor | None, up: Tensor) -> Tensor:
    return up.cos() if gate is None else gate.cos() * up


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda config: MoE(config, router=Reversed(config)), "needs the router of the config, maxmoe.nn.Router, got"),
        (lambda config: MoE(config, activation=gated_by_cosine), "needs the activation of the config in experts, got"),
    ],
    ids=["router", "activation"],
)
def test_parts_of_ones_own_are_refused(make: Any, message: str, tmp_path: Path) -> None:
    block = block_of("mixtral")
    layer = make(presets.from_transformers(block.experts.config))
    with pytest.raises(ValueError, match=f"to_transformers {re.escape(message)}"):
        layer.to_transformers(block)
    with pytest.raises(ValueError, match=f"model.layers.0: write_checkpoint {re.escape(message)}"):
        write_checkpoint(tmp_path / "file", {"model.layers.0": layer}, "mixtral")
    assert_nothing_moved(layer, block)
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("mixtral", "fp8_block", "experts.gate_up_proj: a slice of rows of weights quantized as fp8_block"),
        ("longcat_flash", "int4", "experts.gate_up_proj has 4 matrices of zeros that the block does not use"),
    ],
)
def test_quantized_experts_that_do_not_fit_a_block(name: str, format: str, message: str) -> None:
    block = block_of(name)
    layer = MoE(config_of_block(block)).requires_grad_(False)
    quantize_experts(layer, format)
    with pytest.raises(ValueError, match=message):
        layer.to_transformers(block)
    assert_nothing_moved(layer, block)
