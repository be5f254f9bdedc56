"""The bits of a token's result depend neither on its batch nor on the number of threads."""

import pytest
import torch
from torch import Tensor

from maxmoe import MoE
from maxmoe.nn import SharedExperts
from support.moe_layers import DEEPSEEK, make
from support.shapes import each_dtype

NUM_TOKENS = 70  # prefixes have every remainder modulo a vector width
OPTIONS = {**DEEPSEEK, "load_balance_loss_weight": 0.0, "router_z_loss_weight": 0.0}


def outputs_and_gradients(module: MoE | SharedExperts, x: Tensor, cotangent: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    output = module(x) if isinstance(module, SharedExperts) else module(x).hidden_states
    (gradient,) = torch.autograd.grad(output, x, cotangent)
    return torch.cat((output.detach(), gradient), dim=1)


@pytest.mark.parametrize("part", ["shared_experts", "layer"])
@each_dtype
def test_of_a_prefix(dtype: torch.dtype, part: str) -> None:
    layer = make(dtype, **OPTIONS)
    module = layer if part == "layer" else layer.shared_experts
    assert isinstance(module, MoE | SharedExperts)
    x, cotangent = torch.randn(2, NUM_TOKENS, layer.config.hidden_size, dtype=torch.float64).to(dtype)
    whole = outputs_and_gradients(module, x, cotangent)
    prefixes = [outputs_and_gradients(module, x[:n], cotangent[:n]) for n in range(NUM_TOKENS)]
    differ = [n for n, prefix in enumerate(prefixes) if not prefix.equal(whole[:n])]
    assert not differ


def test_for_any_number_of_threads() -> None:
    """Enough tokens for torch to divide pointwise operators among threads."""
    layer = make(torch.float32, hidden_size=3, intermediate_size=2, **OPTIONS)
    x, cotangent = torch.randn(2, 70_001, layer.config.hidden_size)
    first = outputs_and_gradients(layer, x, cotangent)
    for threads in (2, 4):
        torch.set_num_threads(threads)
        assert outputs_and_gradients(layer, x, cotangent).equal(first)
