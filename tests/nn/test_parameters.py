"""Parameters of the layer: names, initial values, copies, devices and dtypes."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from maxmoe import MoE, MoEConfig, ZeroComputation
from support.moe_layers import EVERYTHING, INKLING, LAYERS, SIZES, ZAYA, Options, make, outcome, tokens
from support.operator_calls import assert_near, assert_same

SMALLEST = {"router.weight": (6, 7), "experts.up_proj": (6, 7, 5), "experts.down_proj": (6, 5, 7)}
# Options, and the names and shapes of the parameters and buffers that they add.
SHAPES: dict[str, tuple[Options, dict[str, tuple[int, ...]]]] = {
    "everything": (
        {"gated": True, **EVERYTHING},
        {
            "router.bias": (6,),
            "router.score_correction_bias": (6,),
            "experts.gate_proj": (6, 7, 5),
            "experts.gate_bias": (6, 5),
            "experts.up_bias": (6, 5),
            "experts.down_bias": (6, 7),
            "shared_experts.gate_proj": (7, 10),
            "shared_experts.up_proj": (7, 10),
            "shared_experts.down_proj": (10, 7),
            "shared_experts.output_gate": (7,),
        },
    ),
    "latent": (
        {"latent_size": 4, "expert_bias": True, "zero_computation": ZeroComputation(copy=1, constant=4)},
        {
            "latent_in.weight": (7, 4),
            "latent_out.weight": (4, 7),
            "experts.up_proj": (6, 4, 5),
            "experts.down_proj": (6, 5, 4),
            "experts.up_bias": (6, 5),
            "experts.down_bias": (6, 4),
            "router.weight": (11, 7),
            "zero_computation_experts.vectors": (4, 7),
            "zero_computation_experts.mixing": (4, 2, 7),
        },
    ),
    "inkling": (
        INKLING,
        {
            "router.weight": (8, 7),
            "router.scale": (1,),
            "router.score_correction_bias": (6,),
            "shared_experts.up_proj": (2, 7, 5),
            "shared_experts.down_proj": (2, 5, 7),
        },
    ),
    "zaya": (
        ZAYA,
        {
            "router.weight": (7, 4),
            "router.score_correction_bias": (7,),
            "router.mlp.down_weight": (4, 7),
            **{f"router.mlp.{name}": (4, 4) for name in ("fc1_weight", "fc2_weight")},
            **{f"router.mlp.{name}_bias": (4,) for name in ("down", "fc1", "fc2")},
            **{f"router.mlp.{name}": (4,) for name in ("state_scale", "norm_weight")},
        },
    ),
}


@pytest.mark.parametrize(("options", "added"), SHAPES.values(), ids=SHAPES)
def test_names_and_shapes(options: Options, added: dict[str, tuple[int, ...]]) -> None:
    layer = MoE(MoEConfig(**{**SIZES, "gated": False, **options}))
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {**SMALLEST, **added}
    assert all(parameter.requires_grad for parameter in layer.parameters())
    buffers = {name for name in added if name.endswith("correction_bias")}
    assert set(layer.state_dict()) - set(dict(layer.named_parameters())) == buffers


def test_how_it_computes_does_not_show_in_the_state_dict() -> None:
    expected = MoE(MoEConfig(**SIZES, **EVERYTHING)).state_dict()
    for options in ({"implementation": "dense", "capacity_factor": 1.0}, {"buffer_factor": 2.0}, {"router": "random"}):
        state = MoE(MoEConfig(**SIZES, **options, **EVERYTHING)).state_dict()
        assert [(name, each.shape) for name, each in state.items()] == [(n, each.shape) for n, each in expected.items()]


def saved_and_loaded(layer: MoE) -> MoE:
    other = make(**EVERYTHING)
    torch.save(layer.state_dict(), file := io.BytesIO())
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    return other


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), saved_and_loaded])
def test_copies_compute_the_same_and_share_nothing(copied: Any) -> None:
    layer = make(**EVERYTHING)
    x = tokens(layer)
    expected = outcome(layer, x)
    other = copied(layer)
    assert other.config == layer.config
    with torch.no_grad():
        for value in layer.state_dict().values():
            value.zero_()
    assert_same(outcome(other, x), expected)


# Initial values


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_initial_values(gated: bool) -> None:
    """Each matrix preserves the variance of its input; no two experts are equal initially."""
    sizes = {"hidden_size": 200, "intermediate_size": 120, "num_experts": 10, "top_k": 2, "latent_size": 80}
    layer = MoE(MoEConfig(**sizes, gated=gated, **EVERYTHING, zero_computation=ZeroComputation(constant=40)))
    fan_ins = {"experts.down_proj": 120, "shared_experts.down_proj": 240, "zero_computation_experts.vectors": 1}
    fan_ins |= {"latent_out.weight": 80, "experts.gate_proj": 80, "experts.up_proj": 80}
    for name, value in layer.state_dict().items():
        if name.endswith("bias"):
            assert not value.any(), name
            continue
        fan_in = fan_ins.get(name, 200)
        error = 4 / value.numel() ** 0.5  # over 5 standard deviations of the estimate
        assert value.mean().item() == pytest.approx(0.0, abs=error * fan_in**-0.5), name
        assert value.std().item() == pytest.approx(fan_in**-0.5, rel=error), name
        flat = value.flatten()
        assert flat.unique().numel() > 0.9 * flat.numel(), name


# Routers with hidden layers draw these twice when they are made.
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("zaya", "hidden layers")])
def test_a_layer_on_meta_is_completed_by_its_reset(name: str) -> None:
    """The initialisation follows the seed."""
    config = make(**LAYERS[name]).config
    layer = MoE(config, device="meta")
    assert all(value.is_meta for value in layer.state_dict().values())
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for value in filter(torch.Tensor.is_floating_point, layer.state_dict().values()):
            value.fill_(torch.nan)
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    for key, value in MoE(config).state_dict().items():
        assert torch.equal(value, layer.state_dict()[key]), key


def test_initial_numbers_of_families() -> None:
    inkling, zaya, muse_spark = (MoE(make(**LAYERS[name]).config) for name in ("inkling", "zaya", "muse_spark"))
    assert inkling.router.scale.tolist() == [1.0] and zaya.router.mlp.state_scale.tolist() == [1.0] * 4
    assert not muse_spark.experts.norm.weight.any() and not muse_spark.latent_in.norm.weight.any()


def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same() -> None:
    layer = make(load_balance_loss_weight=0.3, **EVERYTHING)
    x = tokens(layer)
    expected = outcome(layer, x)
    for frozen in layer.children():
        frozen.requires_grad_(False)
        got = outcome(layer, x)
        trained = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
        assert {name for name, gradient in got.gradients.items() if gradient is not None} == {"x", *trained}
        for name in ("x", *trained):
            assert_near(got.gradients[name], expected.gradients[name], 1e-14, name)
        frozen.requires_grad_(True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype(dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    config = MoEConfig(**SIZES, **EVERYTHING)
    for layer in (MoE(config, dtype=dtype), MoE(config).to(dtype)):
        for name, value in layer.state_dict().items():
            assert value.dtype == (wide if name == "router.score_correction_bias" else dtype), name
    torch.set_default_dtype(torch.float64)
    assert MoE(config).experts.up_proj.dtype == torch.float64
