"""Tests of every operator: a test file derives from `OperatorTests` and defines how to call the operator."""

import importlib
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from maxmoe import ops, reference
from support.memory import saved_for_backward
from support.named import named
from support.operator_calls import (
    Call,
    Result,
    assert_same,
    cotangents_of,
    expected_result,
    floating,
    refusal,
    result,
    strided,
    tolerance,
)
from support.paths import each_case, emulated
from support.shapes import (
    DTYPES,
    MANY_ROWS,
    NO_TOKEN,
    ODD_WIDTHS,
    SEVERAL_BLOCKS,
    SHAPES,
    SKEWED,
    TINY,
    UNROUTED,
    Shape,
)

NAN = float("nan")
# Warnings of torch: it loads forward-mode rules with torch.jit, and runs an operator once for each member of a batch.
ignore_warnings_of_transforms = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated", "ignore:There is a performance drop"
)


class AutogradTests:
    """How an operator is called; its derivatives, what is saved for them, and compilation."""

    # Number of roundings to a 16 bit dtype between the arguments and any result.
    roundings: ClassVar[int] = 1
    # Operators of the backward that the gradients of several arguments need.
    shared_in_backward: ClassVar[frozenset[str]] = frozenset()
    # Arguments that may be left out, one or all of them.
    optional: ClassVar[tuple[str, ...]] = ()

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def call(self, shape: Shape) -> Call:
        """The operator on random float64 arguments of this shape."""
        raise NotImplementedError

    @ignore_warnings_of_transforms
    @pytest.mark.parametrize(
        ("shape", "along_one_vector"),
        [(TINY, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((TINY, False), (UNROUTED, True)))],
        ids=str,
    )
    def test_gradcheck(self, path: str, shape: Shape, along_one_vector: bool) -> None:
        """Reverse, forward, and one after the other; for one vector and for a batch of them.

        First derivatives are compared along one random vector, or in full.
        """
        function, values = function_of(self.call(shape).trainable())
        forward = {"check_forward_ad": True, "check_batched_forward_grad": True}
        assert gradcheck(function, values, fast_mode=along_one_vector, check_batched_grad=True, **forward)
        second = {"check_fwd_over_rev": True, "check_rev_over_rev": True}
        assert gradgradcheck(function, values, fast_mode=True, check_batched_grad=True, **second)

    @ignore_warnings_of_transforms
    @pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
    def test_function_transforms_in_forward_mode(self, path: str, trained: bool) -> None:
        function, values = function_of(self.call(TINY))
        jacobians = torch.autograd.functional.jacobian(function, values)
        values = tuple(value.requires_grad_(trained) for value in values)
        tangents = tuple(torch.randn_like(value) for value in values)
        batch = tuple(torch.stack([value, 2 * value]) for value in values)

        _, got = torch.func.jvp(function, values, tangents)
        along = zip(got, *[jacobians] if len(got) > 1 else [[jacobians[0]]], strict=True)
        for tangent, jacobian in along:
            expected = sum(torch.tensordot(j, t, t.dim()) for j, t in zip(jacobian, tangents, strict=True))
            torch.testing.assert_close(tangent, expected)
        torch.testing.assert_close(torch.func.jacfwd(function, tuple(range(len(values))))(*values), jacobians)
        both = zip(function(*values), function(*(2 * value for value in values)), strict=True)
        torch.testing.assert_close(torch.func.vmap(function)(*batch), tuple(torch.stack(pair) for pair in both))

    def test_function_transforms_in_reverse_mode_are_refused(self, path: str) -> None:
        call = self.call(TINY)
        function, values = function_of(call)
        message = rf"maxmoe::{call.operator}\w*: gradients must be taken with"
        for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
            with pytest.raises(NotImplementedError, match=message):
                transform(lambda *values: function(*values)[0].sum())(*values)

    def test_no_grad_saves_nothing(self, path: str) -> None:
        call = self.call(SKEWED)
        with saved_for_backward() as saved:
            with torch.no_grad():
                outputs = call.trainable()()
            call()
        assert not any(output.requires_grad for output in outputs)
        assert not saved

    def test_split_backward(self, path: str) -> None:
        """Gradients that are asked for one by one have the same bits, and none is computed when it is not asked for."""
        call = self.call(SKEWED).trainable()
        outputs, leaves = call(), list(call.floats().values())

        def gradients(*wanted: Tensor) -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(
                floating(outputs), wanted, cotangents_of(outputs), retain_graph=True, allow_unused=True
            )

        with ExecutedOperators() as together:
            expected = dict(zip(call.floats(), gradients(*leaves), strict=True))
        with ExecutedOperators() as apart:
            got = tuple(gradients(leaf)[0] for leaf in leaves)
        assert_same(Result((), dict(zip(call.floats(), got, strict=True))), Result((), expected))
        counts = (Counter(name for name, _ in executed.calls) for executed in (together, apart))
        one, other = ({name: n for name, n in each.items() if name not in self.shared_in_backward} for each in counts)
        assert one == other

    def test_activation_checkpointing(self, path: str) -> None:
        call = self.call(SKEWED).trainable()
        outputs = checkpoint(lambda **values: call.replace(**values)(), use_reentrant=False, **call.floats())
        gradients = torch.autograd.grad(
            floating(outputs), list(call.floats().values()), cotangents_of(outputs), allow_unused=True
        )
        assert_same(Result(outputs, dict(zip(call.floats(), gradients, strict=True))), result(call))

    def test_opcheck(self) -> None:
        check_registrations(self.call(SKEWED))

    def test_compiles_without_graph_breaks(self) -> None:
        check_compile(self.call(SKEWED), "aot_eager")


class OperatorTests(AutogradTests):
    """All common tests; a class that derives from it is collected once per operator."""

    @each_case(
        "shape, dtype",
        [*product(SHAPES, [torch.float64]), *product([SKEWED, ODD_WIDTHS, SEVERAL_BLOCKS], DTYPES[1:])],
        in_emulator=[(SKEWED, torch.float64), (UNROUTED, torch.float64), (ODD_WIDTHS, torch.bfloat16)],
    )
    def test_equals_reference(self, every_path: str, shape: Shape, dtype: torch.dtype) -> None:
        call = self.call(shape).cast(dtype)
        got = result(call)
        assert all(output.dtype == self.result_dtype(dtype) for output in floating(got.outputs))
        assert_same(got, expected_result(call), tolerance(dtype, self.roundings))

    def test_without_optional_arguments(self, every_path: str) -> None:
        for shape, left_out in product((SKEWED, UNROUTED), [*((name,) for name in self.optional), self.optional]):
            call = self.call(shape)
            fewer = Call(call.operator, {name: v for name, v in call.arguments.items() if name not in left_out})
            with named(shape, left_out):
                assert_same(result(fewer), result(fewer, reference), tolerance(torch.float64, 1))

    @emulated
    def test_graph_without_tokens(self, every_path: str) -> None:
        """A result without elements is part of the graph too: every rank and step runs the same backward."""
        call = self.call(NO_TOKEN).trainable()
        for output in floating(call()):
            assert output.requires_grad
            output.sum().backward(retain_graph=True)

    @pytest.mark.parametrize("layout", ["transposed", "columns", "rows", "expanded"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_strides_do_not_matter(self, every_path: str, dtype: torch.dtype, layout: str) -> None:
        call = self.call(ODD_WIDTHS).cast(dtype)
        other = call.replace(**{name: strided(value, layout) for name, value in call.tensors().items()})
        same = other.replace(**{name: value.contiguous() for name, value in other.tensors().items()})
        assert_same(result(other), result(same), tolerance(dtype, self.roundings))

    def test_expanded_upstream_gradient(self, every_path: str) -> None:
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
        # The products of ATen are repeatable for the same number of threads only.
        for threads in (1, 2, 4, 4) if path == "cpu" else (2, 2):
            torch.set_num_threads(threads)
            assert_same(result(call), first)

    def test_wrong_tensors_are_refused(self, path: str) -> None:
        """Each tensor with another dtype, without dimensions, or on another device than the others."""
        call = self.call(SKEWED).cast(torch.float32)
        tensors = call.tensors()
        for name, tensor in tensors.items():
            word = name.replace("_factors.", "_")
            dtype = torch.int64 if tensor.is_floating_point() else torch.int32
            wrong_tensors = [
                (tensor.to(dtype), (word, {torch.int64: "Long", torch.int32: "Int"}[dtype])),
                (tensor.new_zeros(()), (word, "[]")),
                (tensor.to("meta"), ("cpu", "meta")),
            ]
            for wrong, words in wrong_tensors[: 3 if len(tensors) > 1 else 2]:
                with named(name, words), refusal(call.operator, *words):
                    call.replace(**{name: wrong})()


class UnreadElements:
    """Tests that what belongs to nobody, such as a row past the last group, reaches no result, be it NaN."""

    def unread(self, call: Call) -> dict[str, Tensor]:
        """Masks of rows or elements of arguments, and of the gradient of the result under the name "out"."""
        raise NotImplementedError

    @emulated
    def test_nan_of_nobody_stays_out(self: Any, every_path: str) -> None:
        call = self.call(UNROUTED)
        values = {**call.floats(), "out": cotangents_of(call())[0]}
        for name, mask in self.unread(call).items():
            assert mask.any(), name
            values[name] = values[name].masked_fill(
                mask.view(*mask.shape, *[1] * (values[name].dim() - mask.dim())), NAN
            )
        cotangent = values.pop("out")
        call = call.replace(**values)
        got = result(call, ops, [cotangent])
        for value in (got.outputs[0], *got.gradients.values()):
            assert value is not None and value.isfinite().all()
        assert_same(got, result(call, reference, [cotangent]), tolerance(torch.float64, 1))


def function_of(call: Call) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """The call as a function of its floating tensors, and these tensors."""
    names = list(call.floats())

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(floating(call.replace(**dict(zip(names, values, strict=True)))()))

    return function, tuple(call.floats().values())


class MixedWeights:
    """Tests of the operators with `weights`, which stay float32 beside 16 bit rows."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_float32_weights(self: Any, every_path: str, dtype: torch.dtype) -> None:
        call = self.call(ODD_WIDTHS)
        call = call.cast(dtype).replace(weights=call.arguments["weights"].float())
        got = result(call)
        assert got.outputs[0].dtype == dtype
        assert got.gradients["weights"].dtype == torch.float32
        assert_same(got, expected_result(call), tolerance(dtype, self.roundings))


class ExecutedOperators(TorchDispatchMode):
    """The operators that are executed while the mode is active, backward included.

    Attributes:
        times: how often each was executed, by name.
        calls: our operators with their arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[str] = Counter()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times[str(function)] += 1
        if function.namespace == "maxmoe":
            names = [argument.name for argument in function._schema.arguments]
            self.calls.append((function._opname, {**dict(zip(names, args, strict=False)), **(kwargs or {})}))
        return function(*args, **(kwargs or {}))


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
    compiled = SimpleNamespace(**{call.operator: compile_whole(getattr(ops, call.operator), backend)})
    assert_same(result(call, compiled), result(call), tolerance(torch.float64, 1))


def check_registrations(call: Call) -> None:
    """torch.library.opcheck of the registered operator, with the arguments that the dispatcher gets."""
    recorded = []

    class Record(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(function).startswith("maxmoe."):
                recorded.append((function, args, kwargs or {}))
            return function(*args, **(kwargs or {}))

    cotangents = cotangents_of(call())
    with Record(), mock.patch("torch.compiler.is_compiling", return_value=True):  # then functions call torch.ops
        traced = result(call, cotangents=cotangents)
    assert_same(traced, result(call, cotangents=cotangents), 0)  # by maxmoe._C
    assert recorded, "no operator of torch.ops.maxmoe was called"
    # Since torch 2.15, opcheck reads .grad of copies of the arguments, which are not leaves. Torch hides its warning
    # from users, but not from a filter that raises.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf Tensor", UserWarning)
        for function, args, kwargs in recorded:
            torch.library.opcheck(function, args, kwargs)
