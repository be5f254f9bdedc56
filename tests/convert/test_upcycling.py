"""MoE.from_dense: the output of the dense block where this is possible, and the effect of the options."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxmoe import MoE, MoEConfig, MoEFeedForward, ZeroComputation
from maxmoe.families.deepseek_v4 import HashRouting

SIZES: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 32, "num_experts": 8, "top_k": 2}
WIDTH = 32
ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class Dense(nn.Module):
    """A dense block as in Llama, or one without a gate as in GPT-2."""

    def __init__(self, activation: str = "silu", gated: bool = True, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.activation = ACTIVATIONS[activation]
        self.gate_proj = nn.Linear(24, WIDTH, bias=bias) if gated else None
        self.up_proj, self.down_proj = nn.Linear(24, WIDTH, bias=bias), nn.Linear(WIDTH, 24, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activation(self.up_proj(x)))
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))

    @property
    def projections(self) -> tuple[nn.Linear | None, nn.Linear, nn.Linear]:
        return self.gate_proj, self.up_proj, self.down_proj


def upcycled(dense: Dense, upcycling: dict[str, Any] | None = None, **options: Any) -> MoE:
    torch.manual_seed(1)
    return MoE.from_dense(MoEConfig(**{**SIZES, **options}), *dense.projections, **(upcycling or {}))


def assert_equal(layer: MoE, dense: Dense, relative: float = 1e-6) -> None:
    x = torch.randn(4, 50, 24, generator=torch.Generator().manual_seed(2))
    expected = dense(x)
    difference = (layer(x).hidden_states - expected).abs().max() / expected.abs().max()
    assert difference < relative, f"{difference:.1e}"


SLICES = {"intermediate_size": 8, "num_experts": 16, "top_k": 4}  # four slices, four virtual groups
EQUAL: dict[str, dict[str, Any]] = {
    "copies": {},
    "one expert": {"num_experts": 1, "top_k": 1},
    "scaled": {"routed_scaling_factor": 2.5, "score_function": "sigmoid", "score_correction_bias": True},
    "softmax of the selected": {"score_function": "identity", "normalization": "softmax", "router_bias": True},
    "slices": SLICES,
    "slices of two groups": {**SLICES, "top_k": 8},
    "half slices": {"intermediate_size": 16},
    "groups of the router": {**SLICES, "num_groups": 2, "top_k_groups": 1, "score_function": "sigmoid"},
    "shared": {**SLICES, "num_experts": 12, "top_k": 3, "num_shared_experts": 1},
    "gated shared": {**SLICES, "top_k": 2, "num_shared_experts": 2, "shared_expert_gate": True},
    "dense implementation": {**SLICES, "implementation": "dense"},
}


@pytest.mark.parametrize("options", EQUAL.values(), ids=EQUAL)
def test_normalized_weights_give_the_dense_block(options: dict[str, Any]) -> None:
    dense = Dense()
    assert_equal(upcycled(dense, **options), dense)


@pytest.mark.parametrize("options", [{}, SLICES], ids=["copies", "slices"])
@pytest.mark.parametrize("block", [("relu", False), ("relu2", False), ("gelu_tanh", True)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_of_all_kinds(block: tuple[str, bool], bias: bool, options: dict[str, Any]) -> None:
    activation, gated = block
    dense = Dense(activation, gated, bias)
    assert_equal(upcycled(dense, **options, activation=activation, gated=gated, expert_bias=bias), dense)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("options", [{}, SLICES], ids=["copies", "slices"])
def test_weights_that_are_not_normalized(score_function: str, options: dict[str, Any]) -> None:
    """The output is equal for a router without preferences, otherwise equal up to a factor per token."""
    dense = Dense()
    layer = upcycled(dense, **options, score_function=score_function, normalization="none", routed_scaling_factor=1.5)
    x = torch.randn(500, 24)
    ratio = (layer(x).hidden_states / dense(x)).median(1).values
    assert 0.5 < ratio.median() < 4 and ratio.std() > 0.01
    with torch.no_grad():
        layer.router.weight.zero_()
    assert_equal(layer, dense)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"normalization": "none"}, 16 * 4 / 8),  # E G / T for softmax before the selection
        ({"score_function": "identity", "normalization": "softmax"}, 4),  # G for softmax over the selected
    ],
    ids=["all", "selected"],
)
def test_scaling_of_all_matrices_is_that_of_megatron(options: dict[str, Any], scale: float) -> None:
    """By cube roots."""
    dense = Dense()
    layer = upcycled(dense, {"scaling": "all"}, **{**SLICES, "top_k": 8, **options})
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = dense.get_submodule(name).weight
        part = weight[:, :8] if name == "down_proj" else weight[:8]
        torch.testing.assert_close(layer.experts.get_parameter(name)[4], part.T * scale ** (1 / 3))


@pytest.mark.parametrize(("activation", "gated"), [("relu", False), ("relu", True), ("relu2", False)])
def test_scaling_of_all_matrices_gives_the_dense_block(activation: str, gated: bool) -> None:
    dense = Dense(activation, gated, bias=not gated)
    options = {"activation": activation, "gated": gated, "expert_bias": not gated}
    assert_equal(upcycled(dense, {"scaling": "all"}, **SLICES, **options), dense)


def test_scaling_none() -> None:
    dense = Dense()
    layer = upcycled(dense, {"scaling": "none"}, **SLICES, score_function="identity", normalization="none")
    assert torch.equal(layer.experts.down_proj[5], dense.down_proj.weight[:, 8:16].T)


def test_the_router_gets_no_gradient_from_copies_in_the_first_step() -> None:
    """The weights sum to one and the experts are equal, as the docs say; with noise there is a gradient."""
    for noise, is_trained in ((0.0, False), (0.1, True)):
        layer = upcycled(Dense(), {"noise": noise})
        layer(torch.randn(2, 50, 24)).hidden_states.square().sum().backward()
        assert (layer.router.weight.grad.abs().max() > 1e-3) == is_trained


def test_noise() -> None:
    dense = Dense()
    layer = upcycled(dense, {"noise": 0.1}, num_experts=64)
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = dense.get_submodule(name).weight
        noise = (layer.experts.get_parameter(name) - weight.T) / weight.std()
        assert noise.std().item() == pytest.approx(0.1, rel=0.02) and abs(noise.mean()) < 1e-3
        assert not torch.equal(noise[0], noise[1])


def test_reinitialized_channels() -> None:
    """The same channels of all three matrices are drawn anew, different ones in every expert."""
    dense = Dense()
    with torch.no_grad():
        dense.up_proj.weight += 3
    layer = upcycled(dense, {"reinitialized": 0.25}, num_experts=64)
    differ = {
        "gate_proj": (layer.experts.gate_proj != dense.gate_proj.weight.T).any(1),
        "up_proj": (layer.experts.up_proj != dense.up_proj.weight.T).any(1),
        "down_proj": (layer.experts.down_proj != dense.down_proj.weight.T).any(2),
    }
    channels = differ["up_proj"]
    assert (channels.sum(1) == 8).all() and len(channels.unique(dim=0)) > 60
    assert all(torch.equal(channels, other) for other in differ.values())
    drawn = layer.experts.up_proj.mT[channels]
    assert drawn.mean().item() == pytest.approx(3, rel=0.01)
    assert drawn.std().item() == pytest.approx(dense.up_proj.weight.std().item(), rel=0.05)


def test_the_layer_is_trained_and_the_block_left_as_it_is() -> None:
    """The expert matrices are copies, in the dtype of the block."""
    dense = Dense().to(torch.bfloat16).requires_grad_(False)
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    config = MoEConfig(**SIZES)
    layer = MoEFeedForward.from_dense(config, *(each.weight for each in dense.projections if each is not None))
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    layer(torch.randn(2, 8, 24, dtype=torch.bfloat16)).square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        parameter.data.sub_(parameter.grad)
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())
    on_meta = MoE.from_dense(config, *(each.weight.to("meta") for each in dense.projections if each is not None))
    assert all(parameter.is_meta for parameter in on_meta.parameters())


def linear(inputs: int, outputs: int, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **{"bias": False, **options})


ERRORS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"intermediate_size": 12}, {}, "intermediate_size (12) must divide the width of the dense block (32)"),
    ({**SLICES, "num_experts": 6}, {}, "num_experts (6) must be a multiple of the number of slices"),
    ({**SLICES, "top_k": 6}, {}, "top_k (6) must be a multiple of the number of slices that the routed"),
    ({**SLICES, "num_groups": 8, "top_k_groups": 4}, {}, "num_experts / num_groups (2) must be a multiple"),
    ({"num_shared_experts": 1}, {}, "num_shared_experts (1) must be below the number of slices"),
    ({"apply_weights_to": "input"}, {}, "from_dense needs apply_weights_to='output', got 'input'"),
    ({"score_function": "identity", "normalization": "none"}, {}, "score_function='identity' with"),
    ({"latent_size": 8}, {}, "from_dense needs latent_size=None, got 8"),
    ({"zero_computation": ZeroComputation(zero=1, copy=2)}, {}, "from_dense needs a config without zero, copy and"),
    ({"router": HashRouting(num_ids=3)}, {}, "from_dense needs a router that selects all slices or none, by scores"),
    ({"gated": False}, {}, "gate_proj must be None with gated=False, got Linear"),
    ({}, {"gate_proj": None}, "gate_proj must be given with gated=True, got None"),
    ({}, {"up_proj": linear(16, 32)}, "up_proj must have shape (32, 24), which is (out, in) as in torch.nn.Linear"),
    ({}, {"down_proj": linear(24, 32)}, "down_proj must have shape (24, 32), which is (out, in)"),
    ({}, {"gate_proj": linear(24, 32).half()}, "gate_proj must be torch.float32 on cpu as up_proj is"),
    ({}, {"up_proj": None}, "up_proj must be a torch.nn.Linear or its weight, got NoneType"),
    ({}, {"up_proj": torch.zeros(32)}, "up_proj must be a floating matrix (out, in), got torch.float32"),
    ({}, {"up_proj": "up"}, "up_proj must be a torch.nn.Linear or its weight, got str"),
    ({}, {"up_proj": linear(24, 32, bias=True)}, "the dense block has up_bias: expert_bias must be True, got False"),
    (
        {**SLICES, "num_shared_experts": 2, "expert_bias": True},
        {"up_proj": linear(24, 32, bias=True)},
        "must be 0, got 2",
    ),
    ({}, {"scaling": "up"}, "scaling must be one of ('down_proj', 'all', 'none'), got 'up'"),
    ({}, {"noise": -0.1}, "noise must be a finite float >= 0, got -0.1"),
    ({}, {"reinitialized": 1.5}, "reinitialized must be a fraction of at most 1, got 1.5"),
]


def test_noise_on_a_single_weight() -> None:
    config = MoEConfig(hidden_size=1, intermediate_size=1, num_experts=2, top_k=1, normalization="none")
    layer = MoE.from_dense(config, *(torch.ones(1, 1) for _ in range(3)), noise=0.1, reinitialized=1.0, scaling="none")
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


def test_a_config_of_another_library_is_named() -> None:
    with pytest.raises(TypeError, match=r"config must be a maxmoe.MoEConfig, got dict"):
        MoE.from_dense(SIZES, *Dense().projections)  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "arguments", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_what_does_not_fit_is_named(options: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    dense = Dense()
    given = {"gate_proj": dense.gate_proj, "up_proj": dense.up_proj, "down_proj": dense.down_proj, **arguments}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        MoE.from_dense(MoEConfig(**{**SIZES, **options}), **given)
