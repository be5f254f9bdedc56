"""The bits of a token's result depend neither on its batch nor on the number of threads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import MoE
from maxmoe.nn import SharedExperts
from support.moe_layers import DEEPSEEK, LAYERS, LLAMA4, Options, make, others_for, outcome, tokens
from support.operator_calls import assert_same

NUM_TOKENS = 70  # prefixes have every remainder modulo a vector width


def outputs_and_gradients(module: MoE | SharedExperts, x: Tensor, cotangent: Tensor, **others: Any) -> Tensor:
    x = x.detach().requires_grad_()
    output = module(x, **others)
    if not isinstance(output, Tensor):
        output = output.hidden_states
    (gradient,) = torch.autograd.grad(output, x, cotangent)
    return torch.cat((output.detach(), gradient), dim=1)


WITH_NORMS = ["muse_spark", "norms of tokens and sum", "zaya"]  # whose gradients are sums of torch


@pytest.mark.parametrize(
    "name", ["shared_experts", "plain", "deepseek", "longcat_flash", "inkling", "latent", *WITH_NORMS]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_a_prefix(dtype: torch.dtype, name: str) -> None:
    options = {**LAYERS.get(name, DEEPSEEK), "load_balance_loss_weight": 0.0, "router_z_loss_weight": 0.0}
    layer = make(dtype, **{**options, "hidden_size": 19})
    module = layer.shared_experts if name == "shared_experts" else layer
    x, cotangent = torch.randn(2, NUM_TOKENS, 19, dtype=torch.float64).to(dtype)
    others = others_for(layer, x)
    width = 19 if name in WITH_NORMS else None

    def prefix(count: int) -> Tensor:
        part = {key: value[:count] for key, value in others.items()}
        return outputs_and_gradients(module, x[:count], cotangent[:count], **part)[:, :width]

    whole = prefix(NUM_TOKENS)
    assert [count for count in range(NUM_TOKENS) if not prefix(count).equal(whole[:count])] == []


def test_for_any_number_of_threads() -> None:
    """Enough tokens for torch to divide pointwise operators among threads."""
    options = {**DEEPSEEK, "load_balance_loss_weight": 0.0, "router_z_loss_weight": 0.0}
    layer = make(torch.float32, hidden_size=3, intermediate_size=2, **options)
    x, cotangent = torch.randn(2, 70_001, layer.config.hidden_size)
    first = outputs_and_gradients(layer, x, cotangent)
    for threads in (2, 4):
        torch.set_num_threads(threads)
        assert outputs_and_gradients(layer, x, cotangent).equal(first)


@pytest.mark.parametrize("options", [DEEPSEEK, LLAMA4, {"buffer_factor": 0.6}], ids=["deepseek", "llama4", "buffer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_all_gradients_for_any_number_of_threads(dtype: torch.dtype, options: Options) -> None:
    layer = make(dtype, hidden_size=66, intermediate_size=35, **{**options, "router_bias": True})
    x = tokens(layer, 2, 350)
    first = outcome(layer, x)
    for threads in (1, 2, 4, 4):
        torch.set_num_threads(threads)
        assert_same(outcome(layer, x), first)
