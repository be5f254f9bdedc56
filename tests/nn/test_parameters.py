"""Parameters of the layer: names, initial values, copies, devices and dtypes."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from maxmoe import MoE, MoEConfig
from support.moe_layers import EVERYTHING, SIZES, Options, each_family, make, outcome, tokens
from support.operator_calls import assert_near, assert_same, tolerance


def shapes_of(**options: Any) -> dict[str, tuple[int, ...]]:
    layer = MoE(MoEConfig(**SIZES, **options))
    return {name: tuple(value.shape) for name, value in layer.state_dict().items()}


# State dict


def test_state_dict_of_a_layer_with_everything() -> None:
    assert shapes_of(**EVERYTHING) == {
        "router.weight": (6, 7),
        "router.bias": (6,),
        "router.score_correction_bias": (6,),
        "experts.gate_proj": (6, 7, 5),
        "experts.up_proj": (6, 7, 5),
        "experts.down_proj": (6, 5, 7),
        "experts.gate_bias": (6, 5),
        "experts.up_bias": (6, 5),
        "experts.down_bias": (6, 7),
        "shared_experts.gate_proj": (7, 10),
        "shared_experts.up_proj": (7, 10),
        "shared_experts.down_proj": (10, 7),
        "shared_experts.output_gate": (7,),
    }


def test_state_dict_of_the_smallest_layer() -> None:
    assert shapes_of(gated=False) == {
        "router.weight": (6, 7),
        "experts.up_proj": (6, 7, 5),
        "experts.down_proj": (6, 5, 7),
    }
    assert shapes_of(gated=False, expert_bias=True, num_shared_experts=1) == {
        "router.weight": (6, 7),
        "experts.up_proj": (6, 7, 5),
        "experts.down_proj": (6, 5, 7),
        "experts.up_bias": (6, 5),
        "experts.down_bias": (6, 7),
        "shared_experts.up_proj": (7, 5),
        "shared_experts.down_proj": (5, 7),
    }


def test_how_it_computes_does_not_show_in_the_state_dict() -> None:
    for options in ({"implementation": "dense", "capacity_factor": 1.0}, {"buffer_factor": 2.0}, {"router": "random"}):
        assert shapes_of(**options, **EVERYTHING) == shapes_of(**EVERYTHING)


def test_all_but_the_correction_bias_is_trained() -> None:
    layer = MoE(MoEConfig(**SIZES, **EVERYTHING))
    assert all(parameter.requires_grad for parameter in layer.parameters())
    assert set(layer.state_dict()) - set(dict(layer.named_parameters())) == {"router.score_correction_bias"}


def test_state_dict_round_trip() -> None:
    layer, other = make(**EVERYTHING), make(**EVERYTHING)
    x = tokens(layer)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert_same(outcome(other, x), outcome(layer, x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@pytest.mark.parametrize("implementation", ["sparse", "dense"])
def test_copies_compute_the_same_and_share_nothing(implementation: str, copied: Any) -> None:
    layer = make(implementation=implementation, **EVERYTHING)
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
    sizes = {"hidden_size": 200, "intermediate_size": 120, "num_experts": 10, "top_k": 2}
    layer = MoE(MoEConfig(**sizes, gated=gated, **EVERYTHING))
    for name, value in layer.state_dict().items():
        if name.endswith("bias"):
            assert not value.any(), name
            continue
        fan_in = {"router.weight": 200, "experts.down_proj": 120, "shared_experts.down_proj": 240}.get(name, 200)
        error = 4 / value.numel() ** 0.5  # over 5 standard deviations of the estimate
        assert value.mean().item() == pytest.approx(0.0, abs=error * fan_in**-0.5), name
        assert value.std().item() == pytest.approx(fan_in**-0.5, rel=error), name
        flat = value.flatten()
        assert flat.unique().numel() > 0.9 * flat.numel(), name


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "relu2", "swigluoai"])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_initial_outputs_are_of_the_order_of_the_inputs(score_function: str, activation: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_experts": 8, "top_k": 2}
    layer = MoE(MoEConfig(**sizes, score_function=score_function, activation=activation, num_shared_experts=1))
    x = torch.randn(400, 64)
    routed, _, stats = layer(x)
    assert layer.router(x).logits.var().item() == pytest.approx(1.0, rel=0.2)
    assert 0.1 < routed.var().item() < 4.0
    assert stats.dead_expert_fraction == 0 and stats.load_max_over_mean < 2


def test_reset_is_the_initialisation_and_follows_the_seed() -> None:
    config = MoEConfig(**SIZES, **EVERYTHING)
    torch.manual_seed(5)
    first = MoE(config)
    second = MoE(config)
    assert not torch.equal(first.experts.up_proj, second.experts.up_proj)
    with torch.no_grad():
        for value in second.state_dict().values():
            value.fill_(float("nan"))
    torch.manual_seed(5)
    second.reset_parameters()
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same() -> None:
    layer = make(load_balance_loss_weight=0.3, **EVERYTHING)
    x = tokens(layer)
    expected = outcome(layer, x)
    for frozen in layer.children():
        assert isinstance(frozen, torch.nn.Module)
        frozen.requires_grad_(False)
        got = outcome(layer, x)
        trained = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
        assert {name for name, gradient in got.gradients.items() if gradient is not None} == {"x", *trained}
        for name in ("x", *trained):
            assert_near(got.gradients[name], expected.gradients[name], 1e-14, name)
        frozen.requires_grad_(True)


# Device and dtype


def test_from_meta_to_a_device() -> None:
    config = MoEConfig(**SIZES, **EVERYTHING)
    layer = MoE(config, device="meta")
    assert all(value.is_meta for value in layer.state_dict().values())
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    expected = MoE(config)
    x = torch.randn(2, 5, 7)
    assert_same(outcome(layer, x), outcome(expected, x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype(dtype: torch.dtype) -> None:
    layer = MoE(MoEConfig(**SIZES, **EVERYTHING), dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    for name, value in layer.state_dict().items():
        assert value.dtype == (wide if name == "router.score_correction_bias" else dtype), name
    converted = MoE(MoEConfig(**SIZES, **EVERYTHING)).to(dtype)
    for name, value in converted.state_dict().items():
        assert value.dtype == layer.state_dict()[name].dtype, name


def test_default_dtype_is_torchs() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert MoE(MoEConfig(**SIZES)).experts.up_proj.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


# For print


def test_repr() -> None:
    layer = MoE(MoEConfig(**SIZES, score_function="sigmoid", activation="gelu", num_shared_experts=2))
    assert repr(layer) == (
        "MoE(\n"
        "  hidden_size=7, intermediate_size=5, num_experts=6, top_k=3, score_function='sigmoid', activation='gelu', "
        "num_shared_experts=2\n"
        "  (router): Router()\n"
        "  (experts): Experts()\n"
        "  (shared_experts): SharedExperts()\n"
        ")"
    )


@each_family
@pytest.mark.parametrize(
    ("held", "computed"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)], ids=str
)
def test_autocast_to_the_other_16_bits(held: torch.dtype, computed: torch.dtype, options: Options) -> None:
    """Parameters and tokens in bfloat16 under an autocast to float16, and the reverse: as in float32."""
    layer = make(held, **options)
    x = tokens(layer, 2, 9)
    expected = copy.deepcopy(layer).float()(x.float())
    with torch.autocast("cpu", dtype=computed):
        got = layer(x)
    assert got.hidden_states.dtype == computed
    assert_near(got.hidden_states, expected.hidden_states, tolerance(torch.bfloat16, 8), "hidden_states")
