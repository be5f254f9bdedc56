"""Router: precision, the correction bias and its balancing, the random router."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from maxmoe import MoE, StatsAccumulator, reference
from maxmoe.nn import LocalTokens, rand_of_tokens
from support.moe_layers import make, tokens
from support.shapes import each_dtype

BALANCING: dict[str, Any] = {"score_correction_bias": True, "correction_bias_update_rate": 0.25}
LOW_PRECISION = [torch.bfloat16, torch.float16]


def correction_bias(layer: MoE) -> Tensor:
    bias = layer.router.score_correction_bias
    assert bias is not None
    return bias


# Precision


@each_dtype
def test_is_in_float32_or_wider(path: str, dtype: torch.dtype) -> None:
    """The result equals that of widened x and parameters: no product is rounded to 16 bits."""
    wide = torch.promote_types(dtype, torch.float32)
    router = make(dtype, router_bias=True, hidden_size=65).router
    x = torch.randn(20, 65).to(dtype)
    routing = router(x)
    assert (routing.logits.dtype, routing.weights.dtype, routing.experts.dtype) == (wide, wide, torch.int64)
    assert router.bias is not None
    expected = functional.linear(x.double(), router.weight.double(), router.bias.double())
    torch.testing.assert_close(
        routing.logits.double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5
    )


class Model(nn.Module):
    """A model whose layers differ by their paths only; one of them is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = make(), nn.ModuleList(nn.Sequential(nn.Identity(), make()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x).hidden_states + self.first(x).hidden_states
        for number, block in enumerate(self.layers):
            x = x + (checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)).hidden_states
        return x


@pytest.mark.parametrize("place", ["first", "layers.0.1", "layers.3.1"])
def test_the_error_says_which_layer_of_a_model_it_was(place: str) -> None:
    model, x = nn.Sequential(Model()), torch.randn(2, 5, 7, dtype=torch.float64)
    model(x)
    model.get_submodule(f"0.{place}").router.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=rf"^0\.{re.escape(place)}\.router: maxmoe::route: logits .*NaN"):
        model(x)
    router = make().router
    with pytest.raises(ValueError, match=r"^Router: maxmoe::route: logits .*NaN"):  # no module calls it
        router(torch.full((5, 7), torch.nan).double())


def test_nan_in_the_correction_bias_is_not_blamed_on_the_logits() -> None:
    layer = make(score_correction_bias=True)
    correction_bias(layer)[3] = float("nan")
    with pytest.raises(ValueError, match=r"^router: maxmoe::route: correction_bias must be numbers, got NaN$"):
        layer(tokens(layer))


# Correction bias


def test_update_adds_the_rate_towards_the_mean() -> None:
    layer = make(**BALANCING)
    bias = correction_bias(layer)
    before = bias.clone()
    layer.update_correction_bias(torch.tensor([0, 1, 2, 2, 3, 4]))
    assert torch.equal(bias - before, 0.25 * torch.tensor([1.0, 1.0, 0.0, 0.0, -1.0, -1.0]).double())
    layer.update_correction_bias(torch.tensor([0, 0, 0, 0, 0, 12]))
    assert torch.equal(bias - before, 0.25 * torch.tensor([2.0, 2.0, 1.0, 1.0, 0.0, -2.0]).double())
    layer.update_correction_bias(torch.zeros(6, dtype=torch.int64))
    assert torch.equal(bias - before, 0.25 * torch.tensor([2.0, 2.0, 1.0, 1.0, 0.0, -2.0]).double())
    assert bias is correction_bias(layer) and not bias.requires_grad


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_small_steps_are_not_lost_in_16_bits(dtype: torch.dtype) -> None:
    options = {"score_correction_bias": True, "correction_bias_update_rate": 1e-3}
    for layer in (make(dtype, **options), make(torch.float32, **options).to(dtype)):
        assert layer.router.weight.dtype == dtype and correction_bias(layer).dtype == torch.float32
        correction_bias(layer).fill_(1.0)
        for _ in range(10):
            layer.update_correction_bias(2**40 + torch.tensor([0, 2, 1, 1, 1, 1]))  # compared as integers
        expected = torch.tensor([1.01, 0.99, 1.0, 1.0, 1.0, 1.0])
        torch.testing.assert_close(correction_bias(layer), expected, rtol=1e-6, atol=0)
    torch.set_default_dtype(dtype)
    layer = make(torch.float32, **options)
    correction_bias(layer).zero_()
    layer.update_correction_bias(torch.tensor([0, 2, 1, 1, 1, 1]))
    assert torch.equal(correction_bias(layer), torch.tensor([1e-3, -1e-3, 0, 0, 0, 0], dtype=torch.float32))


@pytest.mark.parametrize(("assign", "device"), [(False, "cpu"), (True, "cpu"), (True, "meta")])
def test_bias_of_a_loaded_state_of_16_bits(assign: bool, device: str) -> None:
    """The loaded values are kept, and later updates are not rounded away."""
    layer = make(torch.float32, **{**BALANCING, "correction_bias_update_rate": 1e-3})
    state = {name: tensor.bfloat16() for name, tensor in layer.state_dict().items()}
    state["router.score_correction_bias"].fill_(1.0)
    loaded = MoE(layer.config, device=device, dtype=torch.bfloat16)
    loaded.load_state_dict(state, assign=assign)
    loaded.update_correction_bias(torch.tensor([0, 2, 1, 1, 1, 1]))
    expected = torch.tensor([1.001, 0.999, 1.0, 1.0, 1.0, 1.0])
    torch.testing.assert_close(correction_bias(loaded), expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("rule", ["sign", "quantile"])
def test_bias_that_was_replaced_by_one_of_16_bits(rule: str) -> None:
    """The update raises before it changes anything."""
    layer = make(torch.float32, score_function="sigmoid", correction_bias_rule=rule, **BALANCING)
    sums = StatsAccumulator(layer)
    layer(tokens(layer)).hidden_states.sum().backward()
    layer.router.score_correction_bias = correction_bias(layer).half()
    before = correction_bias(layer).clone()
    with pytest.raises(ValueError, match=r"score_correction_bias must be float32 or wider, .* got torch.float16"):
        sums.update()
    assert torch.equal(correction_bias(layer), before)
    layer.router.score_correction_bias = before.float()
    assert sums.update().layers["moe"].tokens_per_expert.sum() > 0


@pytest.mark.parametrize(
    ("options", "counts", "message"),
    [
        ({}, (6,), "update_correction_bias needs score_correction_bias=True in the config, got False"),
        (BALANCING, (5,), r"tokens_per_expert must have shape \(6,\), got \(5,\)"),
        (BALANCING, (1, 6), r"tokens_per_expert must have shape \(6,\), got \(1, 6\)"),
        (BALANCING, (), r"tokens_per_expert must have shape \(6,\), got \(\)"),
    ],
)
def test_update_refuses(options: dict[str, Any], counts: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options).update_correction_bias(torch.zeros(counts, dtype=torch.int64))


# Random router


def test_random_router_selects_by_normal_noise_with_the_gradient_of_the_logits() -> None:
    """The noise depends on the seed and not on the tokens."""
    layer = make(router="random", router_bias=True)
    router, x = layer.router, tokens(layer, 20).requires_grad_()
    cotangent = torch.randn(20, 3, dtype=torch.float64)
    assert router.bias is not None
    leaves = [x, router.weight, router.bias]
    torch.manual_seed(3)
    routing = router(x)
    gradients = torch.autograd.grad(routing.weights, leaves, cotangent)

    torch.manual_seed(3)
    uniform = rand_of_tokens(torch.empty(1, 20, 6, dtype=torch.float64), LocalTokens())
    noise = torch.special.ndtri(uniform[0]).requires_grad_()
    weights, experts, _ = reference.route(noise, 3)
    assert torch.equal(routing.experts, experts)
    torch.testing.assert_close(routing.weights, weights)
    (of_logits,) = torch.autograd.grad(weights, noise, cotangent)
    expected = torch.autograd.grad(functional.linear(*leaves), leaves, of_logits)
    torch.testing.assert_close(gradients, expected)
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
