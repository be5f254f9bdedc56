"""CUDA kernels in the emulator: the context, and the number of operator calls of a layer.

The tests of operators and layers run in it too: those that take `every_path`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from maxmoe import _C, ops
from maxmoe.quantization import quantize
from support.device_memory import computes
from support.ffn_call import ffn_call
from support.moe_layers import make, tokens
from support.operator_calls import assert_same, result
from support.shapes import SKEWED
from support.threads import in_threads

EMULATOR = Path(_C.__file__).with_name("libmaxmoe_cuda_emulator.so")
needs_emulator = pytest.mark.skipif(not EMULATOR.exists(), reason="the emulator of CUDA is built with the C++ tests")


class ComputedOperators(TorchDispatchMode):
    """Counts PyTorch's operators that compute something, also those called inside of operators of maxmoe."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "maxmoe":
            with self:
                return function._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        results = function(*args, **kwargs)
        self.number += computes(function, tree_leaves((args, kwargs)), tree_leaves(results))
        return results


def number_of_calls(function: Callable[[], Any]) -> tuple[int, Any]:
    with ComputedOperators() as computed:
        made = function()
    return computed.number, made


def calls_of_a_layer(top_k: int) -> tuple[int, int]:
    """Return the number of operators in the forward and in the backward."""
    layer = make(torch.bfloat16, hidden_size=64, intermediate_size=32, num_experts=16, top_k=top_k)
    x = tokens(layer, 16).requires_grad_()
    forward, out = number_of_calls(lambda: layer(x).hidden_states)
    grad = torch.ones_like(out)
    backward, _ = number_of_calls(lambda: out.backward(grad))
    return forward, backward


@needs_emulator
@pytest.mark.parametrize("K", [2, 8])
def test_number_of_operator_calls(K: int) -> None:
    """Operators of PyTorch, which bound the time of few tokens, without the launches of our kernels."""
    with ops.force_aten():
        assert calls_of_a_layer(K) <= (56, 69)
    with ops.force_cuda_emulator():
        assert calls_of_a_layer(K) <= (17, 13)


@needs_emulator
def test_quantized_matrices_go_through_aten() -> None:
    stack = quantize(torch.randn(3, 64, 32), "int8")
    lhs, sizes = torch.randn(7, 64), torch.tensor([2, 0, 4])
    with ops.force_aten():
        expected = ops.gmm(lhs, stack, sizes)
    with ops.force_cuda_emulator():
        assert torch.equal(ops.gmm(lhs, stack, sizes), expected)


@needs_emulator
def test_more_experts_than_the_shared_memory_holds() -> None:
    logits = torch.randn(2, 2049, dtype=torch.float64)
    with ops.force_aten():
        expected = ops.route(logits, 3)
    with ops.force_cuda_emulator():
        assert all(torch.equal(got, want) for got, want in zip(ops.route(logits, 3), expected, strict=True))


@needs_emulator
def test_contexts_nest() -> None:
    call = ffn_call(SKEWED).cast(torch.float32)
    on_cpu = result(call)
    with ops.force_aten():
        through_aten = result(call)
        with ops.force_cuda_emulator():
            through_kernels = result(call)
            with ops.force_aten(False):
                assert_same(result(call), on_cpu)
        assert_same(result(call), through_aten)
    assert_same(result(call), on_cpu)
    assert not torch.equal(through_kernels.outputs[0], through_aten.outputs[0])  # shows that the implementations differ
    assert_same(through_kernels, on_cpu, 1e-5)


@needs_emulator
def test_one_thread_at_a_time() -> None:
    def enter() -> None:
        with ops.force_cuda_emulator():
            pass

    with ops.force_aten(), pytest.raises(RuntimeError, match="force_cuda_emulator applies to all threads"):
        in_threads(enter)
    in_threads(enter)


def test_unknown_path() -> None:
    with pytest.raises(ValueError, match=r"the path must be kernels, cuda_emulator or aten, got cuda"):
        _C.force_path("cuda")


def test_the_state_of_the_kernels_for_gpus() -> None:
    """The kernels need a driver, if they are built at all."""
    assert _C.build_info()["cuda_kernels"]
