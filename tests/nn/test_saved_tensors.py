"""The tensors that autograd saves for the layer's backward."""

from typing import Any

import pytest
import torch

from maxmoe import MoEConfig
from maxmoe.nn import SharedExperts
from support.moe_layers import EVERYTHING, SIZES, make, tokens
from support.operator_calls import saved_for_backward


@pytest.mark.parametrize("weights_to", ["output", "input"])
def test_saves_the_tokens_and_the_preactivations(path: str, weights_to: str) -> None:
    """D + 2 K F numbers per token, and little for the routing; the rows of D only where they are scaled."""
    sizes = {"hidden_size": 50, "intermediate_size": 10, "num_experts": 4, "top_k": 2}
    layer = make(torch.float32, apply_weights_to=weights_to, **sizes)
    x = tokens(layer, 30).requires_grad_()
    with saved_for_backward() as saved:
        layer(x)
    parameters = {parameter.data_ptr() for parameter in layer.parameters()}
    kept = {t.data_ptr(): t for t in saved if t.is_floating_point() and t.data_ptr() not in parameters}
    rows = 2 * 50 if weights_to == "input" else 0
    routing = 4 + 2  # logits, weights
    assert sum(t.numel() for t in kept.values()) <= 30 * (50 + 2 * 2 * 10 + rows + routing)


def test_shared_experts_save_the_tokens_and_the_preactivations(path: str) -> None:
    layer = SharedExperts(MoEConfig(**{**SIZES, "hidden_size": 50}, num_shared_experts=2, shared_expert_gate=True))
    x = torch.randn(30, 50, requires_grad=True)
    with saved_for_backward() as saved:
        layer(x)
    parameters = {parameter.data_ptr() for parameter in layer.parameters()}
    kept = {t.data_ptr(): t for t in saved if t.is_floating_point() and t.data_ptr() not in parameters}
    assert sum(t.numel() for t in kept.values()) <= 30 * (50 + 2 * 10 + 3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("implementation", ["sparse", "dense"])
def test_nothing_is_kept_without_gradients(implementation: str, mode: Any) -> None:
    layer = make(implementation=implementation, load_balance_loss_weight=0.3, **EVERYTHING)
    x = tokens(layer)
    expected = layer(x)
    with saved_for_backward() as saved, mode():
        hidden_states, aux_loss, _ = layer(x)
    assert not saved and not hidden_states.requires_grad and not aux_loss.requires_grad
    assert torch.equal(hidden_states, expected.hidden_states) and torch.equal(aux_loss, expected.aux_loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_nothing_wide_is_kept_of_16_bits(path: str, dtype: torch.dtype) -> None:
    """(D + 2 K F) times 2 bytes per token, the indices, and of the router the logits and weights in float32."""
    tokens_, hidden, width, experts, top_k = 300, 50, 10, 4, 2
    layer = make(dtype, hidden_size=hidden, intermediate_size=width, num_experts=experts, top_k=top_k)
    x = tokens(layer, tokens_).requires_grad_()
    with saved_for_backward() as saved:
        layer(x)
    parameters = {parameter.data_ptr() for parameter in layer.parameters()}
    kept = {tensor.data_ptr(): tensor for tensor in saved if tensor.data_ptr() not in parameters}
    routing = 4 * experts + top_k * (4 + 3 * 8)  # logits; weights, experts, slots, rows
    at_most = tokens_ * (2 * (hidden + 2 * top_k * width) + routing) + 8 * experts
    assert sum(tensor.nbytes for tensor in kept.values()) <= at_most
