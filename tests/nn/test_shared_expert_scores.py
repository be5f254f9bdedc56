"""Shared experts that the router scores, and the trained scale of its weights: values, gradients, config, surgery."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE, MoEConfig, ZeroComputation, record_routing, replay_routing
from maxmoe.convert.surgery import duplicate_experts, prune_experts
from maxmoe.families.inkling import SharedExpertScores
from support.moe_layers import SIZES, Options, assert_meets_specification, each_compute, make, outcome, tokens
from support.operator_calls import assert_same
from support.operator_checks import compile_whole

LOSSES: Options = {"load_balance_loss_weight": 0.3, "router_z_loss_weight": 0.2}
SCORED: Options = {
    "score_function": "sigmoid",
    "num_shared_experts": 2,
    "router": SharedExpertScores(scale=False),
    **LOSSES,
}
INKLING: Options = {
    **SCORED,
    "router": SharedExpertScores(),
    "score_correction_bias": True,
    "routed_scaling_factor": 2.5,
}
VARIANTS: dict[str, Options] = {
    "inkling": INKLING,
    "biased": {**SCORED, "router_bias": True, "zero_computation": ZeroComputation(copy=2, constant=1)},
    "latent, no gate": {**SCORED, "latent_size": 4, "gated": False, "activation": "relu2"},
}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@each_compute
def test_meets_the_specification(path: str, compute: Options, variant: Options) -> None:
    layer = make(**variant, **compute)
    assert_meets_specification(layer)


def test_the_weights_of_a_token_have_the_sum_of_the_scale() -> None:
    routing = make(**INKLING).router(torch.randn(9, 7, dtype=torch.float64))
    assert routing.logits.shape == (9, 6) and routing.weights.shape == (9, 3) and routing.shared_weights.shape == (9, 2)
    sums = routing.weights.sum(1) + routing.shared_weights.sum(1)
    torch.testing.assert_close(sums, sums[:1].expand(9))


def test_recomputed_compiled_and_replayed() -> None:
    """Beside experts of all kinds without a computation."""
    layer = make(**INKLING, zero_computation=ZeroComputation(zero=1, copy=2, constant=1))
    x = tokens(layer, 3, 8)
    expected = outcome(layer, x)
    kept = partial(checkpoint, layer, use_reentrant=False, context_fn=maxmoe.keep_routing)
    assert_same(outcome(layer, x, kept), expected, 1e-14)
    assert_same(outcome(layer, x, compile_whole(layer, "aot_eager")), expected, 1e-12)
    with record_routing(layer) as record:
        layer(x)
    with replay_routing(layer, record):
        assert_same(outcome(layer, x), expected, 1e-14)
    maxmoe.set_recompute(layer, ("experts", "shared_experts", "dispatch"))
    assert_same(outcome(layer, x), expected, 1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    layer = make(dtype, **INKLING)
    x = tokens(layer, 12)
    got = layer(x).hidden_states
    expected = layer.double()(x.double()).hidden_states
    assert got.dtype == dtype
    assert (got - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


def test_autocast() -> None:
    layer = make(torch.float32, **INKLING)
    x = tokens(layer, 20)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
        output.hidden_states.float().sum().backward()
    expected = layer(x).hidden_states
    assert (output.hidden_states.float() - expected).norm() <= 0.05 * expected.norm()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_initialization() -> None:
    layer = MoE(MoEConfig(**{**SIZES, **INKLING, "hidden_size": 300}))
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes["router.weight"] == (8, 300) and shapes["router.scale"] == (1,)
    assert shapes["shared_experts.up_proj"] == (2, 300, 5) and shapes["shared_experts.down_proj"] == (2, 5, 300)
    assert layer.router.scale.tolist() == [1.0]
    assert float(layer.shared_experts.up_proj.detach().std()) * 300**0.5 == pytest.approx(1, abs=0.1)


def test_surgery_keeps_the_rows_of_shared_experts_and_the_scale() -> None:
    layer = make(**{**INKLING, "num_experts": 18, "top_k": 2})
    x, scale, shared = tokens(layer, 4), layer.router.scale, layer.router.weight[18:].clone()
    expected = layer(x)
    idle = (expected.stats.tokens_per_expert == 0).nonzero().flatten().tolist()
    prune_experts(layer, idle)
    torch.testing.assert_close(layer(x).hidden_states, expected.hidden_states)
    duplicate_experts(layer, [0])
    assert layer.router.scale is scale and torch.equal(layer.router.weight[19 - len(idle) :], shared)
    assert_meets_specification(layer, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shared_experts": 0}, "num_shared_experts >= 1, got 0"),
        ({"score_function": "softmax"}, "score_function='sigmoid', got 'softmax'"),
        ({"normalization": "none"}, "normalization='sum', got 'none'"),
        ({"apply_weights_to": "input"}, "apply_weights_to='output', got 'input'"),
        ({"shared_expert_gate": True}, "shared_expert_gate=False, got True"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^SharedExpertScores\(scale=False\) needs {message}$"):
        MoEConfig(**{**SIZES, **SCORED, **options})


def test_one_expert_beside_shared_ones_has_a_weight_that_is_trained() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = make(**{**SCORED, "top_k": 1})
    assert_meets_specification(layer, tokens(layer))
    assert outcome(layer, tokens(layer)).gradients["router.weight"].any()


def test_a_custom_router_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a name with a custom router, got SharedExpertScores\(scale=False\)"):
        MoE(MoEConfig(**SIZES, **SCORED), router=torch.nn.Linear(7, 6))
