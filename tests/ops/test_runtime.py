"""Contexts that choose the path of all operators of the process."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from maxmoe import _C, ops
from support.matrix_calls import ffn_call
from support.operator_calls import assert_same, result
from support.paths import needs_emulator
from support.shapes import SKEWED
from support.threads import in_threads

Context = Callable[[], AbstractContextManager[None]]


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


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (ops.force_aten, "and another thread is in its context"),
        pytest.param(ops.force_cuda_emulator, "force_cuda_emulator applies to all threads", marks=needs_emulator),
    ],
)
def test_one_thread_at_a_time(context: Context, message: str) -> None:
    """A path applies to all threads, so that the end of the first context would end the second one."""

    def enter() -> None:
        with context():
            pass

    with ops.force_aten(), pytest.raises(RuntimeError, match=message):
        in_threads(enter)
    in_threads(enter)


def test_unknown_path() -> None:
    with pytest.raises(ValueError, match=r"the path must be kernels, cuda_emulator or aten, got cuda"):
        _C.force_path("cuda")
