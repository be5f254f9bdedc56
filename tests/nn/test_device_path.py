"""The layer on devices other than the CPU: the host never waits for the device; peak memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import ops
from maxmoe.quantization import FORMATS, quantize
from support.device_memory import DeviceMemory, SynchronizationError, to_device, to_host
from support.moe_layers import EVERYTHING, LAYERS, make, tokens
from support.operator_calls import assert_near

NAMES = ["plain", "deepseek", "gpt_oss", "llama4", "everything"]
OTHERS: dict[str, dict[str, Any]] = {
    "buffer": {"buffer_factor": 0.6, **EVERYTHING},
    "ungated": {"gated": False, "activation": "relu2"},
    "batch": {"load_balance_loss_weight": 0.3, "load_balance_scope": "batch"},
}


def train(layer: Any, x: Tensor, token_mask: Tensor | None) -> dict[str, Any]:
    """Forward and backward, results and gradients."""
    x = x.requires_grad_()
    out = layer(x, token_mask)
    (out.hidden_states.square().sum() + out.aux_loss).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    stats = {"counts": out.stats.tokens_per_expert, "dropped": out.stats.dropped}
    return {"hidden_states": out.hidden_states.detach(), "x": x.grad, **stats, **gradients}


@pytest.mark.parametrize("padding", [False, True], ids=["", "padding"])
@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_nothing_waits_for_the_device(name: str, padding: bool) -> None:
    """Forward and backward without a wait, with the results of the CPU kernels."""
    layer = make(torch.float32, **{**LAYERS, **OTHERS}[name])
    x = tokens(layer)
    token_mask = torch.rand(x.shape[:-1]) < 0.6 if padding else None
    expected = train(layer, x.clone(), token_mask)
    layer.zero_grad()
    with DeviceMemory():
        layer._apply(to_device)
        got = train(layer, to_device(x), None if token_mask is None else to_device(token_mask))
    for name, value in expected.items():
        assert_near(to_host(got[name]), value, 2e-5, name)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: bool(x.any()),
        lambda x: x + torch.ones(2).to(x.device),
        lambda x: ops.ragged_plan(x.long(), 3, num_local_experts=2),
        lambda x: ops.gmm(x.double(), x.double().unsqueeze(0), x[0].long()),
    ],
)
def test_what_waits_is_an_error(wait: Callable[[Tensor], Any]) -> None:
    """The test device detects copies to and from the host, and calls of maxmoe that are documented to wait."""
    with DeviceMemory(), pytest.raises(SynchronizationError):
        wait(to_device(torch.ones(2, 2)))


@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_does_not_wait(format: str) -> None:
    """The table of values of codes is not copied from the host."""
    stack = quantize(torch.randn(3, 64, 128), format)
    tensors = (stack.codes, stack.scales, stack.zeros, stack.row_scales)
    on_host = torch.ops.maxmoe.dequantize(*tensors, format, 64, torch.float32)
    with DeviceMemory():
        on_device = [None if tensor is None else to_device(tensor) for tensor in tensors]
        got = torch.ops.maxmoe.dequantize(*on_device, format, 64, torch.float32)
    assert torch.equal(to_host(got), on_host)


def test_no_copy_of_all_slots_in_the_sum() -> None:
    """Apart from the R rows and their gradients, no tensor has more numbers than the T rows of the result."""
    T, K, D = 30, 6, 16
    experts = torch.stack([torch.randperm(8)[:K] for _ in range(T)])
    with DeviceMemory() as device:
        plan = ops.ragged_plan(to_device(experts), 8, num_rows=T * K)
        rows, weights = to_device(torch.randn(T * K, D)), to_device(torch.rand(T, K))
        device.largest = 0
        ops.ragged_unsort(rows, plan, weights)
    assert device.largest == T * D


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory(dtype: torch.dtype) -> None:
    """Peak memory of forward and backward, without the weights' gradients, in numbers per row (R) and token (T)."""
    T, K, D, F, E = 512, 4, 64, 48, 4
    layer = make(dtype, hidden_size=D, intermediate_size=F, num_experts=E, top_k=K)
    x = tokens(layer, T)
    with DeviceMemory() as device:
        layer._apply(to_device)
        x = to_device(x).requires_grad_()
        before = device.peak_bytes
        out = layer(x).hidden_states
        forward = device.peak_bytes - before
        out.backward(out.detach())
        backward = device.peak_bytes - before
    R, itemsize = T * K, dtype.itemsize
    gradients = 3 * E * D * F * itemsize
    rows, width = R * D * itemsize, R * F * itemsize
    of_tokens = T * D * 4 * itemsize  # the input, the result and two sums
    of_slots = R * 21 * 8  # indices, weights and their gradients
    # The preactivations, with one projection or the activations beside them, and the rows that are multiplied.
    assert forward <= 3 * width + rows + of_tokens + of_slots
    # The preactivations, the gradient of the activations, and two of these: activations, f(gate), its gradient.
    assert backward <= 5 * width + of_tokens + of_slots + gradients
