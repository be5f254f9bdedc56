"""Norms around latent experts and of the output of each expert, and scaled logits."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import ExpertNorms, MoE, MoEConfig
from maxmoe.convert.surgery import duplicate_experts, prune_experts
from maxmoe.families.muse_spark import ScaledLogits
from maxmoe.nn import LatentNorm
from support.moe_layers import SIZES, Options, assert_meets_specification, each_compute, make, outcome, tokens
from support.operator_calls import assert_near, assert_same
from support.operator_checks import compile_whole

LOSSES: Options = {"load_balance_loss_weight": 0.3, "router_z_loss_weight": 0.2}
MUSE_SPARK: Options = {
    **LOSSES,
    "latent_size": 4,
    "expert_norms": ExpertNorms(latent_in=True, output=True),
    "router": ScaledLogits(scale=0.25),
    "score_function": "sigmoid",
    "score_correction_bias": True,
}
KIMI_K3: Options = {**LOSSES, "latent_size": 4, "expert_norms": ExpertNorms(latent_out=True), "num_shared_experts": 1}
VARIANTS: dict[str, Options] = {
    "muse_spark": MUSE_SPARK,
    "kimi_k3": KIMI_K3,
    "tokens and sum": {**LOSSES, "expert_norms": ExpertNorms(input=True, sum=True), "num_shared_experts": 1},
    "not latent": {**LOSSES, "expert_norms": ExpertNorms(output=True), "expert_bias": True},
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@each_compute
def test_meets_the_specification(path: str, compute: Options, variant: Options) -> None:
    layer = make(**variant, **compute)
    assert_meets_specification(layer)


def test_formula_of_kimi_k3() -> None:
    """y = W_up RMSNorm(sum_k w_k expert_k(W_down x)) + shared(x), with torch alone."""
    layer = make(**KIMI_K3)
    x = tokens(layer, 9)
    got = layer(x).hidden_states
    rows, routing = x @ layer.latent_in.weight, layer.router(x)
    experts = layer.experts
    every = torch.stack(
        [
            (F.silu(rows @ experts.gate_proj[e]) * (rows @ experts.up_proj[e])) @ experts.down_proj[e]
            for e in range(layer.config.num_experts)
        ],
        1,
    )
    chosen = every.gather(1, routing.experts.unsqueeze(2).expand(-1, -1, 4))
    latent = (routing.weights.unsqueeze(2) * chosen).sum(1)
    latent = F.rms_norm(latent, (4,), 1 + layer.latent_out.norm.weight, eps=1e-5)
    assert_near(got, latent @ layer.latent_out.weight + layer.shared_experts(x), 1e-12, "hidden_states")


@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_norm(dtype: torch.dtype, scales_input: bool) -> None:
    norm = LatentNorm(19, 1e-8, scales_input=scales_input, dtype=dtype)
    norm.weight.data.normal_()
    x = torch.randn(70, 19).to(dtype)
    factor = 1 + norm.weight.double()
    expected = x.double() * factor if scales_input else x.double()
    expected = expected / (expected.square().mean(1, keepdim=True) + 1e-8).sqrt() * (1 if scales_input else factor)
    whole = norm(x)
    assert whole.dtype == dtype
    assert_near(whole, expected, 1e-14 if dtype == torch.float64 else 0.02, "norm")
    assert [count for count in range(70) if not norm(x[:count]).equal(whole[:count])] == []


def test_recomputed_and_compiled() -> None:
    layer = make(**MUSE_SPARK)
    x = tokens(layer, 3, 8)
    expected = outcome(layer, x)
    kept = partial(checkpoint, layer, use_reentrant=False, context_fn=maxmoe.keep_routing)
    assert_same(outcome(layer, x, kept), expected, 1e-14)
    assert_same(outcome(layer, x, compile_whole(layer, "aot_eager")), expected, 1e-12)
    maxmoe.set_recompute(layer, ("experts", "dispatch"))
    assert_same(outcome(layer, x), expected, 1e-14)


def test_autocast() -> None:
    layer = make(torch.float32, **MUSE_SPARK)
    x = tokens(layer, 20)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
        output.hidden_states.float().sum().backward()
    expected = layer(x).hidden_states
    assert (output.hidden_states.float() - expected).norm() <= 0.05 * expected.norm()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_initialization_and_surgery() -> None:
    layer = make(**{**MUSE_SPARK, "num_experts": 18, "top_k": 2})
    x, norm = tokens(layer, 4), layer.experts.norm.weight
    expected = layer(x)
    prune_experts(layer, (expected.stats.tokens_per_expert == 0).nonzero().flatten().tolist())
    torch.testing.assert_close(layer(x).hidden_states, expected.hidden_states)
    duplicate_experts(layer, [0])
    assert layer.experts.norm.weight is norm
    assert_meets_specification(layer, x)
    layer.reset_parameters()
    assert not norm.any() and not layer.latent_in.norm.weight.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latent_in": True}, r"ExpertNorms\(latent_in=True.* needs a latent_size, got None"),
        ({"latent_out": True}, "latent_out=True.* needs a latent_size, got None"),
        ({"output": True}, "output=True.* needs apply_weights_to='output', got 'input'"),
        ({"output_eps": -1.0}, "output_eps must be a finite float > 0, got -1.0"),
    ],
)
def test_mistakes_in_the_config(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**SIZES, apply_weights_to="input", expert_norms=ExpertNorms(**options))
    with pytest.raises(ValueError, match=r"scale must be a finite float > 0, got 0\.0"):
        ScaledLogits(scale=0.0)


def test_dense_blocks_do_not_become_experts_with_a_norm() -> None:
    config = MoEConfig(**SIZES, expert_norms=ExpertNorms(output=True))
    with pytest.raises(ValueError, match="from_dense needs experts without norms, got ExpertNorms"):
        MoE.from_dense(config, torch.ones(5, 7), torch.ones(5, 7), torch.ones(7, 5))
