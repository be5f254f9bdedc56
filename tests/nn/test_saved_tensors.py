"""The tensors that autograd saves for the layer's backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxmoe import MoEConfig, ZeroComputation
from maxmoe.nn import SharedExperts, TopK
from support.memory import saved_for_backward
from support.moe_layers import EVERYTHING, SIZES, Options, make, tokens

D, F, E, K, L = 50, 10, 4, 2, 16
# Logits; weights, experts, slots and rows of each slot.
ROUTING = 4 * E + K * (4 + 3 * 8)


def kept_bytes(module: nn.Module, *inputs: Any) -> int:
    """The number of bytes that the backward keeps, without the parameters."""
    parameters = {parameter.data_ptr() for parameter in module.parameters()}
    with saved_for_backward() as saved:
        module(*inputs)
    kept = {tensor.data_ptr(): tensor for tensor in saved if tensor.data_ptr() not in parameters}
    return sum(tensor.nbytes for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("options", "numbers", "indices"),
    [
        ({}, D + 2 * K * F, 0),
        ({"apply_weights_to": "input"}, D + 2 * K * F + K * D, K),  # of gathered rows
        ({"latent_size": L}, D + 2 * K * F + 2 * L, 0),
    ],
    ids=["plain", "weights on the input", "latent"],
)
def test_tokens_and_preactivations(path: str, options: Options, numbers: int, indices: int, dtype: torch.dtype) -> None:
    """(D + 2 K F) numbers per token, and the routing; rows of D where they are scaled, latent rows and outputs."""
    layer = make(dtype, hidden_size=D, intermediate_size=F, num_experts=E, top_k=K, **options)
    x = tokens(layer, 300).requires_grad_()
    assert kept_bytes(layer, x) <= 300 * (dtype.itemsize * numbers + ROUTING + 8 * indices) + 8 * (E + 2)


def test_of_shared_experts(path: str) -> None:
    layer = SharedExperts(MoEConfig(**{**SIZES, "hidden_size": D}, num_shared_experts=2, shared_expert_gate=True))
    indices = 300 * 2 * 8 + 8
    assert kept_bytes(layer, torch.randn(300, D, requires_grad=True)) <= 300 * 4 * (D + 2 * 10 + 3) + indices


def test_a_factor_per_token_of_copies() -> None:
    """The only saved tensor besides x, which the layer saves anyway."""
    module = make(torch.bfloat16, zero_computation=ZeroComputation(copy=3), top_k=2).zero_computation_experts
    x = torch.randn(30, 7, dtype=torch.bfloat16, requires_grad=True)
    weights: Tensor = torch.rand(30, 2, requires_grad=True)
    kept = kept_bytes(module, x, TopK(weights, torch.randint(9, (30, 2))))
    assert kept - x.nbytes <= 30 * (4 + 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("implementation", ["sparse", "dense"])
def test_nothing_without_gradients(implementation: str, mode: Any) -> None:
    layer = make(implementation=implementation, load_balance_loss_weight=0.3, **EVERYTHING)
    x = tokens(layer)
    expected = layer(x)
    with saved_for_backward() as saved, mode():
        hidden_states, aux_loss, _ = layer(x)
    assert not saved and not hidden_states.requires_grad and not aux_loss.requires_grad
    assert torch.equal(hidden_states, expected.hidden_states) and torch.equal(aux_loss, expected.aux_loss)
