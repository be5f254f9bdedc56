"""Latent experts: their values against the specification, and the width of their inputs."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE, MoEConfig, ZeroComputation
from maxmoe.nn import LatentProjection
from support.moe_layers import (
    COMPUTE,
    EVERYTHING,
    SIZES,
    Options,
    assert_meets_specification,
    each_compute,
    make,
    outcome,
    tokens,
)
from support.operator_calls import assert_same, saved_for_backward
from support.operator_checks import compile_whole

LOSSES: Options = {"load_balance_loss_weight": 0.3, "router_z_loss_weight": 0.2}
BESIDE: Options = {**EVERYTHING, **LOSSES, "zero_computation": ZeroComputation(copy=2, constant=1)}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("latent_size", [1, 4, 9])
@each_compute
def test_meets_the_specification(path: str, compute: Options, latent_size: int) -> None:
    layer = make(latent_size=latent_size, **BESIDE, **compute)
    assert_meets_specification(layer)


@each_compute
def test_weights_on_the_latent_rows(compute: Options) -> None:
    layer = make(latent_size=4, apply_weights_to="input", num_shared_experts=1, **compute)
    assert_meets_specification(layer, tokens(layer, 2, 9))


def test_projections_that_undo_each_other_change_nothing() -> None:
    plain = make(num_shared_experts=1)
    layer = MoE(MoEConfig(**SIZES, num_shared_experts=1, latent_size=7), dtype=torch.float64)
    assert layer.latent_in is not None and layer.latent_out is not None
    basis, _ = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64))
    state = plain.state_dict()
    state |= {"latent_in.weight": basis, "latent_out.weight": basis.mT}
    for name in ("gate_proj", "up_proj"):
        state[f"experts.{name}"] = basis.mT @ state[f"experts.{name}"]
    state["experts.down_proj"] = state["experts.down_proj"] @ basis
    layer.load_state_dict(state)
    x = tokens(plain, 3, 11)
    torch.testing.assert_close(layer(x).hidden_states, plain(x).hidden_states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saves_latent_rows_and_outputs_beside_the_tokens(dtype: torch.dtype) -> None:
    """(D + 2 L + 2 K F) numbers per token, and the routing."""
    sizes = {"hidden_size": 50, "intermediate_size": 10, "num_experts": 4, "top_k": 2}
    layer = make(dtype, latent_size=16, **sizes)
    x = tokens(layer, 300).requires_grad_()
    with saved_for_backward() as saved:
        layer(x)
    parameters = {parameter.data_ptr() for parameter in layer.parameters()}
    kept = {tensor.data_ptr(): tensor for tensor in saved if tensor.data_ptr() not in parameters}
    routing = 4 * 4 + 2 * (4 + 3 * 8)  # logits; weights, experts, slots and rows
    most = 300 * (dtype.itemsize * (50 + 2 * 16 + 2 * 2 * 10) + routing) + 8 * (4 + 2)
    assert sum(tensor.nbytes for tensor in kept.values()) <= most


def test_bits_of_a_row_are_those_of_the_row_alone() -> None:
    module = LatentProjection(MoEConfig(**{**SIZES, "hidden_size": 37}, latent_size=19), "in", dtype=torch.float32)
    x = torch.randn(70, 37)
    whole = module(x)
    assert [count for count in range(70) if not module(x[:count]).equal(whole[:count])] == []


@each_compute
def test_recomputation(compute: Options) -> None:
    layer = make(latent_size=4, **BESIDE, **compute)
    x = tokens(layer, 3, 8)
    expected = outcome(layer, x)
    kept = partial(checkpoint, layer, use_reentrant=False, context_fn=maxmoe.keep_routing)
    assert_same(outcome(layer, x, kept), expected, 1e-14)
    maxmoe.set_recompute(layer, ("dispatch", "experts"))
    assert_same(outcome(layer, x), expected, 1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("compute", [COMPUTE["sparse"], COMPUTE["dense"]], ids=["sparse", "dense"])
def test_compiled_as_one_graph(compute: Options) -> None:
    """By default, test_latent_norms.py alone compiles such a layer."""
    layer = make(latent_size=4, **compute)
    x = tokens(layer, 2, 6)
    assert_same(outcome(layer, x, compile_whole(layer, "aot_eager")), outcome(layer, x), 1e-12)


def test_autocast() -> None:
    layer = make(torch.float32, latent_size=4)
    x = tokens(layer, 20)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    torch.testing.assert_close(output.hidden_states.float(), layer(x).hidden_states, rtol=0.1, atol=0.3)


def test_quantized_latent_experts() -> None:
    layer = make(torch.float32, hidden_size=48, intermediate_size=32, latent_size=32).requires_grad_(False)
    x = tokens(layer, 9)
    expected = layer(x).hidden_states
    maxmoe.quantize_experts(layer, "int8")
    error = (layer(x).hidden_states - expected).norm() / expected.norm()
    assert 0 < error < 0.02


def test_state_dict_and_initialization() -> None:
    layer = MoE(MoEConfig(**{**SIZES, "hidden_size": 300}, latent_size=100, expert_bias=True), device="meta")
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes["latent_in.weight"] == (300, 100) and shapes["latent_out.weight"] == (100, 300)
    assert shapes["experts.up_proj"] == (6, 100, 5) and shapes["experts.down_proj"] == (6, 5, 100)
    assert shapes["experts.down_bias"] == (6, 100) and shapes["router.weight"] == (6, 300)
    x = torch.randn(50, 300)
    assert layer.latent_in is not None and layer.latent_out is not None
    latent = layer.latent_in(x)
    assert 0.9 < latent.std() < 1.1 and 0.9 < layer.latent_out(latent).std() < 1.1


@pytest.mark.parametrize(("size", "message"), [(0, "a positive int, got 0"), (2.0, r"a positive int, got 2\.0")])
def test_mistakes_in_the_config(size: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"latent_size must be {message}"):
        MoEConfig(**SIZES, latent_size=size)
