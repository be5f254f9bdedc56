"""CUDA kernels in the emulator: the context, the operator calls of a layer, launches and bytes of the experts.

The tests of operators and layers run in it too: those that take `every_path`.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from maxmoe import ops
from maxmoe.quantization import quantize
from support import programs
from support.moe_layers import make, tokens
from support.paths import EMULATOR, needs_emulator

ROOT = Path(__file__).parents[2]
pytestmark = needs_emulator


@contextmanager
def device_of(capability: int, *, capturing: bool = False) -> Iterator[None]:
    """Let the emulator say that it has a compute capability, and that a CUDA graph is being captured."""
    pretend = ctypes.CDLL(str(EMULATOR)).maxmoe_cuda_emulator_pretend
    with ops.force_cuda_emulator():
        pretend(capability, capturing)
        try:
            yield
        finally:
            pretend(0, False)


@pytest.mark.parametrize(
    ("dtype", "capability", "rows", "capturing", "is_ours"),
    [
        (torch.bfloat16, 80, 600, False, True),
        (torch.bfloat16, 90, 4, False, False),
        (torch.bfloat16, 103, 4, False, False),
        (torch.bfloat16, 120, 4, False, True),
        (torch.float16, 80, 600, False, True),
        (torch.float16, 90, 511, False, True),
        (torch.float16, 90, 512, False, False),
        (torch.float16, 90, 512, True, True),
        (torch.float32, 90, 512, False, False),
        (torch.float64, 90, 512, False, True),
    ],
    ids=str,
)
def test_choice_of_products(dtype: torch.dtype, capability: int, rows: int, capturing: bool, is_ours: bool) -> None:
    lhs, rhs, sizes = torch.randn(rows, 8).to(dtype), torch.randn(2, 8, 8).to(dtype), torch.tensor([rows - 1, 1])
    with device_of(capability, capturing=capturing):
        traffic()
        out = ops.gmm(lhs.requires_grad_(), rhs.requires_grad_(), sizes)
        out.sum().backward()
        moved = traffic()
    assert [moved.get(name, (0, 0))[0] for name in ("gmm", "tgmm")] == ([2, 1] if is_ours else [0, 0])


def traffic() -> dict[str, tuple[int, int]]:
    """Return launches, and bytes of rows read and written, of each kernel since the last call."""
    read = ctypes.CDLL(str(EMULATOR)).maxmoe_cuda_emulator_traffic
    read.restype = ctypes.c_char_p
    lines = [line.split() for line in read().decode().splitlines()]
    return {name: (int(launches), int(loaded) + int(stored)) for name, launches, loaded, stored in lines}


def test_launches_and_bytes_of_the_experts() -> None:
    """Every step reads and writes each row once; gmm and tgmm, which read tiles, have no bytes here."""
    T, K, D, F = 16, 4, 64, 32
    config = {"hidden_size": D, "intermediate_size": F, "num_experts": 16, "top_k": K}
    layer = make(torch.bfloat16, **config)
    x = tokens(layer, T).requires_grad_()
    TD, RD, RF = 2 * T * D, 2 * T * K * D, 2 * T * K * F
    with ops.force_cuda_emulator():
        traffic()
        out = layer(x).hidden_states
        assert traffic() == {
            "route": (1, 0),
            "ragged_plan": (4, 0),
            "ragged_gather": (1, 2 * RD),  # x
            "gmm": (3, 0),
            "activate_rows": (1, 3 * RF),
            "ragged_gather_reduce": (1, RD + TD),
        }
        out.backward(torch.ones_like(out))
        assert traffic() == {
            "route_backward": (1, 0),
            "ragged_gather": (3, 4 * RD + 2 * 4 * T * K),  # gradient of the output, x, gradients of the weights
            "gmm": (3, 0),
            "tgmm": (3, 0),
            "activate_rows_backward": (1, 6 * RF),
            "ragged_gather_reduce": (1, 2 * RD + TD),
        }


# Prints the error message for an unknown kernel, then the names of the kernels that have run.
SWITCHED = """
import os

from maxmoe import ops
from ops.test_cuda_emulator import traffic
from support.matrix_calls import ffn_call
from support.operator_calls import assert_same, result
from support.shapes import SKEWED

try:
    ffn_call(SKEWED)
except ValueError as error:
    print(error)
os.environ["MAXMOE_CUDA_KERNELS"] = "all,-gmm,-ragged_gather_reduce,-activate_rows_backward"
call = ffn_call(SKEWED)
on_cpu = result(call)
with ops.force_cuda_emulator():
    assert_same(result(call), on_cpu, 1e-9)
print(*traffic())
"""


def test_kernels_are_switched_off() -> None:
    paths = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "MAXMOE_CUDA_KERNELS": "all,-gnn"}
    error, have_run = programs.printed(programs.run([sys.executable, "-c", SWITCHED], cwd=ROOT, env=paths)).splitlines()
    assert "MAXMOE_CUDA_KERNELS must be a list of all, none, kernels and -kernels, got -gnn" in error
    assert have_run == "activate_rows check_plan ragged_gather tgmm"


def test_quantized_matrices_go_through_aten() -> None:
    stack = quantize(torch.randn(3, 64, 32), "int8")
    lhs, sizes = torch.randn(7, 64), torch.tensor([2, 0, 4])
    with ops.force_aten():
        expected = ops.gmm(lhs, stack, sizes)
    with ops.force_cuda_emulator():
        assert torch.equal(ops.gmm(lhs, stack, sizes), expected)


def test_more_experts_than_the_shared_memory_holds() -> None:
    logits = torch.randn(2, 2049, dtype=torch.float64)
    with ops.force_aten():
        expected = ops.route(logits, 3)
    with ops.force_cuda_emulator():
        assert all(torch.equal(got, want) for got, want in zip(ops.route(logits, 3), expected, strict=True))
