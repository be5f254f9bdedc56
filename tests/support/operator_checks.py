"""What is asked of every operator: a test file derives from `OperatorTests` and says how to call it."""

import importlib
import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maxmoe import ops, reference
from support.operator_calls import (
    Call,
    Result,
    assert_same,
    cotangents_of,
    expected_result,
    floating,
    result,
    saved_for_backward,
    strided,
    tolerance,
)
from support.shapes import MANY_ROWS, NO_TOKEN, ODD_WIDTHS, SKEWED, TINY, UNROUTED, Shape, each_dtype, each_shape


class OperatorTests:
    """The common tests; a class that derives from it is collected once per operator."""

    # Roundings to a 16 bit dtype between the arguments and any result.
    roundings: ClassVar[int] = 1
    # Linear in each tensor, with a backward made of our operators: differentiable any number of times.
    differentiable_twice: ClassVar[bool] = True

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def call(self, shape: Shape) -> Call:
        """The operator on random float64 arguments of this shape."""
        raise NotImplementedError

    @each_dtype
    @each_shape
    def test_equals_reference(self, path: str, shape: Shape, dtype: torch.dtype) -> None:
        call = self.call(shape).cast(dtype)
        got = result(call)
        assert all(output.dtype == self.result_dtype(dtype) for output in floating(got.outputs))
        assert_same(got, expected_result(call), tolerance(dtype, self.roundings))

    def test_graph_without_tokens(self, path: str) -> None:
        """A result without elements is part of the graph too: every rank and step runs the same backward."""
        call = self.call(NO_TOKEN).trainable()
        for output in floating(call()):
            assert output.requires_grad
            output.sum().backward()

    @pytest.mark.parametrize("shape", [TINY, UNROUTED], ids=str)
    def test_gradcheck(self, path: str, shape: Shape) -> None:
        call = self.call(shape).trainable()
        names = list(call.floats())

        def function(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(floating(call.replace(**dict(zip(names, values, strict=True)))()))

        values = tuple(call.floats().values())
        assert torch.autograd.gradcheck(function, values, fast_mode=shape is not TINY)
        if self.differentiable_twice:
            assert torch.autograd.gradgradcheck(function, values, fast_mode=True)

    @pytest.mark.parametrize("layout", ["transposed", "columns", "rows", "expanded"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_strides_do_not_matter(self, path: str, dtype: torch.dtype, layout: str) -> None:
        call = self.call(ODD_WIDTHS).cast(dtype)
        other = call.replace(**{name: strided(value, layout) for name, value in call.tensors().items()})
        same = other.replace(**{name: value.contiguous() for name, value in other.tensors().items()})
        assert_same(result(other), result(same), tolerance(dtype, self.roundings))

    def test_expanded_upstream_gradient(self, path: str) -> None:
        call = self.call(SKEWED)
        outputs = call()
        ones = [torch.ones((), dtype=out.dtype).expand(out.shape) for out in floating(outputs)]
        expected = result(call, reference, [one.contiguous() for one in ones])
        assert_same(result(call, ops, ones), expected, tolerance(torch.float64, 1))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_bitwise_repeatable_for_any_number_of_threads(self, path: str, dtype: torch.dtype) -> None:
        call = self.call(MANY_ROWS).cast(dtype)
        torch.set_num_threads(2)
        first = result(call)
        # The products of ATen are torch's own: repeatable, but for the same number of threads.
        for threads in (1, 2, 4, 4) if path == "cpu" else (2, 2):
            torch.set_num_threads(threads)
            assert_same(result(call), first)

    def test_no_grad_saves_nothing(self, path: str) -> None:
        call = self.call(SKEWED)
        with saved_for_backward() as saved:
            with torch.no_grad():
                outputs = call.trainable()()
            call()
        assert not any(output.requires_grad for output in outputs)
        assert not saved

    def test_activation_checkpointing(self, path: str) -> None:
        call = self.call(SKEWED).trainable()

        def run(**values: Tensor) -> tuple[Tensor, ...]:
            return call.replace(**values)()

        outputs = checkpoint(run, use_reentrant=False, **call.floats())
        gradients = torch.autograd.grad(
            floating(outputs), list(call.floats().values()), cotangents_of(outputs), allow_unused=True
        )
        again = Result(outputs, dict(zip(call.floats(), gradients, strict=True)))
        assert_same(again, result(call))

    def test_opcheck(self, path: str) -> None:
        check_registrations(self.call(SKEWED))

    def test_compiles_without_graph_breaks(self, path: str) -> None:
        check_compile(self.call(SKEWED), "aot_eager")


class DifferentiableOnce:
    """For the operators whose backward is one kernel: a second backward is an error, never a silent zero."""

    differentiable_twice: ClassVar[bool] = False

    def test_second_backward_is_refused(self: Any, path: str) -> None:
        call = self.call(TINY).trainable()
        leaves = list(call.floats().values())
        gradients = torch.autograd.grad(call()[0].square().sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match=f"derivative for maxmoe::{call.operator}_backward"):
            torch.autograd.grad(sum(gradient.sum() for gradient in gradients), leaves)


class MixedWeights:
    """For the operators with `weights`: these stay float32 beside 16 bit rows."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_float32_weights(self: Any, path: str, dtype: torch.dtype) -> None:
        call = self.call(ODD_WIDTHS)
        call = call.cast(dtype).replace(weights=call.arguments["weights"].float())
        got = result(call)
        assert got.outputs[0].dtype == dtype
        assert got.gradients["weights"].dtype == torch.float32
        assert_same(got, expected_result(call), tolerance(dtype, self.roundings))


def compile_whole(function: Any, backend: str, dynamic: bool | None = None) -> Any:
    """torch.compile(fullgraph=True) from scratch."""
    torch._dynamo.reset()
    if backend == "inductor":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, on import
            importlib.import_module("torch._inductor.compile_fx")
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def check_compile(call: Call, backend: str) -> None:
    """Compiled forward and backward equal eager ones."""
    compiled = compile_whole(getattr(ops, call.operator), backend)

    class Compiled:
        pass

    setattr(Compiled, call.operator, staticmethod(compiled))
    assert_same(result(call, Compiled), result(call), tolerance(torch.float64, 1))


def check_registrations(call: Call) -> None:
    """torch.library.opcheck of the operator as the dispatcher sees it, with the arguments that it gets."""
    recorded = []

    class Record(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(function).startswith("maxmoe."):
                recorded.append((function, args, kwargs or {}))
            return function(*args, **(kwargs or {}))

    with Record():
        call.trainable()()
    assert recorded, "no operator of torch.ops.maxmoe was called"
    for function, args, kwargs in recorded:
        torch.library.opcheck(function, args, kwargs)
