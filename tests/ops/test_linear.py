"""linear: out = x @ weight^T + bias, summed in float32 or wider whatever the dtypes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import ops, reference
from support.operator_calls import (
    Call,
    assert_same,
    cotangents_of,
    expected_result,
    refusal,
    result,
    saved_for_backward,
    short,
    tolerance,
)
from support.operator_checks import OperatorTests, check_compile, check_registrations
from support.shapes import DTYPES, MANY_ROWS, ODD_WIDTHS, SEVERAL_BLOCKS, SKEWED, TINY, Shape

# Equal, each of the two wider, and both of 16 bits.
MIXES = [
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float16),
]
each_mix = pytest.mark.parametrize("dtypes", MIXES, ids=lambda mix: " ".join(map(short_name, mix)))


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def logits_call(shape: Shape) -> Call:
    """The logits of a router."""
    return Call(
        "linear",
        {
            "x": torch.randn(shape.num_tokens, shape.hidden_size, dtype=torch.float64),
            "weight": torch.randn(shape.num_experts, shape.hidden_size, dtype=torch.float64),
            "bias": torch.randn(shape.num_experts, dtype=torch.float64),
        },
    )


def mixed(call: Call, *dtypes: torch.dtype) -> Call:
    """Return the call with x and weight in these dtypes, and the bias in the dtype of the weight."""
    of_x, of_weight = dtypes
    given = call.arguments
    return call.replace(x=given["x"].to(of_x), weight=given["weight"].to(of_weight), bias=given["bias"].to(of_weight))


class TestLinear(OperatorTests):
    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def call(self, shape: Shape) -> Call:
        return logits_call(shape)


@each_mix
@pytest.mark.parametrize("shape", [ODD_WIDTHS, MANY_ROWS], ids=str)
def test_any_dtypes(path: str, dtypes: tuple[torch.dtype, torch.dtype], shape: Shape) -> None:
    """The result has the precision of the sums; each gradient is rounded once to the dtype of its argument."""
    call = mixed(logits_call(shape), *dtypes)
    got, expected = result(call), expected_result(call)
    sums = torch.promote_types(torch.promote_types(*dtypes), torch.float32)
    assert got.outputs[0].dtype == sums
    precision = tolerance(sums, 1)
    torch.testing.assert_close(got.outputs[0].double(), expected.outputs[0], rtol=precision, atol=10 * precision)
    for name, gradient in got.gradients.items():
        dtype, exact = call.arguments[name].dtype, expected.gradients[name]
        assert gradient is not None and exact is not None and gradient.dtype == dtype
        rounding = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(
            gradient.double(), exact, rtol=1.01 * rounding + precision, atol=50 * precision + torch.finfo(dtype).tiny
        )


@pytest.mark.parametrize("out_dtype", DTYPES, ids=short_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=short_name)
def test_any_result(path: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    call = logits_call(SEVERAL_BLOCKS).cast(dtype).replace(out_dtype=out_dtype)
    got = result(call)
    assert got.outputs[0].dtype == out_dtype
    wide = max(torch.finfo(dtype).eps, torch.finfo(out_dtype).eps, key=float)
    assert_same(got, expected_result(call.replace(out_dtype=None)), 32 * wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short_name)
def test_products_are_not_rounded(path: str, dtype: torch.dtype) -> None:
    """Terms that a sum in 16 bits loses."""
    x, weight = torch.tensor([[256.0, 1.0, 1.0]], dtype=dtype), torch.tensor([[16.0, 1.0, 1.0]], dtype=dtype)
    assert ops.linear(x, weight, torch.tensor([0.25])).item() == 4098.25


def test_gradient_is_not_rounded(path: str) -> None:
    """grad is not rounded to 16 bits before products, and the sum over rows is not rounded in between."""
    x = torch.full((3000, 1), 0.5, dtype=torch.bfloat16)
    weight = torch.ones(2, 1, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.full((3000, 2), 1 + 2.0**-12)
    ops.linear(x, weight).backward(grad)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2, 1), 1500 * (1 + 2.0**-12)).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short_name)
@pytest.mark.parametrize("sizes", [(300, 8, 64), (1, 2048, 64), (300, 513, 300), (13, 257, 1)], ids=str)
def test_a_row_does_not_depend_on_others(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    num_rows, inner, columns = sizes
    x, weight = torch.randn(num_rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    together = ops.linear(x, weight)
    for row in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(ops.linear(x[row : row + 1], weight), together[row : row + 1])
    assert torch.equal(ops.linear(torch.cat((x, x.roll(1, 0))), weight)[:num_rows], together)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)], ids=str)
def test_nothing_to_multiply(path: str, sizes: tuple[int, int, int]) -> None:
    """With an inner size of 0 the result is the bias."""
    num_rows, inner, columns = sizes
    arguments = {
        "x": torch.randn(num_rows, inner),
        "weight": torch.randn(columns, inner),
        "bias": torch.randn(columns),
    }
    call = Call("linear", arguments)
    assert_same(result(call), result(call, reference), 1e-6)


def test_nothing_to_multiply_in_any_layout(path: str) -> None:
    """Tensors without elements may have any strides: a slice, an expanded gradient of no rows."""
    x = torch.zeros(4, 8, dtype=torch.bfloat16)[:, 0:0:2]
    assert torch.equal(ops.linear(x, torch.zeros(5, 0)), torch.zeros(4, 5))
    weight = torch.ones(5, 3, dtype=torch.bfloat16, requires_grad=True)
    ops.linear(torch.zeros(0, 3, dtype=torch.bfloat16), weight, out_dtype=torch.bfloat16).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_without_bias(path: str) -> None:
    call = logits_call(SKEWED).replace(bias=None)
    assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


def test_memory_that_is_not_written(path: str) -> None:
    """Deterministic mode fills new memory with NaN, which must not reach a result."""
    call = logits_call(MANY_ROWS).cast(torch.bfloat16)
    expected = result(call)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(result(call), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_saves_the_matrices_as_they_are(path: str) -> None:
    call = mixed(logits_call(SKEWED), torch.bfloat16, torch.float32).trainable()
    with saved_for_backward() as saved:
        call()
    assert {tensor.data_ptr() for tensor in saved} == {tensor.data_ptr() for tensor in call.tensors().values()}


def test_a_bias_alone_needs_no_input(path: str) -> None:
    """Beside a frozen weight, the backward of a trained bias reads neither x nor the weight."""
    call = logits_call(SKEWED).cast(torch.float32)
    call.arguments["bias"].requires_grad_()
    with saved_for_backward() as saved:
        call()
    assert {tensor.numel() for tensor in saved} == {0, call.arguments["bias"].numel()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short_name)
def test_autocast_changes_nothing(path: str, dtype: torch.dtype) -> None:
    call = logits_call(SKEWED).cast(torch.float32)
    expected = result(call)
    with torch.autocast("cpu", dtype=dtype):
        got = result(call)
    assert got.outputs[0].dtype == torch.float32
    assert_same(got, expected)


def test_mixed_dtypes_under_transforms(path: str) -> None:
    call = mixed(logits_call(TINY), torch.bfloat16, torch.float32)
    check_registrations(call)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(call.arguments["x"], torch.ones_like(call.arguments["x"]))
        _, tangent = torch.autograd.forward_ad.unpack_dual(call.replace(x=dual)()[0])
    assert tangent is not None and tangent.dtype == torch.float32
    torch.testing.assert_close(tangent, call.arguments["weight"].sum(1).expand_as(tangent))


def test_second_derivative_of_mixed_dtypes(path: str) -> None:
    """The gradient of x is grad @ weight; the gradient of <grad_x, u> with respect to the weight is grad^T @ u."""
    call = mixed(logits_call(TINY), torch.float32, torch.bfloat16).trainable()
    out, (grad,) = call()[0], cotangents_of(call())
    (grad_x,) = torch.autograd.grad(out, call.arguments["x"], grad, create_graph=True)
    u = torch.randn_like(grad_x)
    (grad_weight,) = torch.autograd.grad(grad_x, call.arguments["weight"], u)
    assert grad_weight.dtype == torch.bfloat16
    torch.testing.assert_close(grad_weight, (grad.t() @ u).bfloat16())


def test_compiles_with_inductor(path: str) -> None:
    check_compile(logits_call(SKEWED), "inductor")


def meta(*sizes: int) -> Tensor:
    return torch.randn(*sizes, device="meta")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.randn(6)}, ("x", "[T, D]", "[6]")),
        ({"x": torch.zeros(6, 4, dtype=torch.int64)}, ("x", "float64", "Long")),
        ({"weight": torch.randn(4)}, ("weight", "[E, D]", "[4]")),
        ({"weight": torch.randn(4, 5)}, ("weight", "4", "D of x", "[4, 5]")),
        ({"weight": torch.zeros(5, 4, dtype=torch.bool)}, ("weight", "float64", "Bool")),
        ({"weight": meta(5, 4)}, ("weight", "cpu", "meta")),
        ({"bias": torch.randn(1, 5)}, ("bias", "[E]", "[1, 5]")),
        ({"bias": torch.randn(4)}, ("bias", "5", "E of weight", "[4]")),
        ({"bias": torch.zeros(5, dtype=torch.int32)}, ("bias", "float64", "Int")),
        ({"bias": meta(5)}, ("bias", "cpu", "meta")),
        ({"out_dtype": torch.int64}, ("out_dtype", "float64", "Long")),
        ({"out_dtype": torch.complex64}, ("out_dtype", "float64", "ComplexFloat")),
    ],
    ids=short,
)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...], trained: bool) -> None:
    call = Call("linear", {"x": torch.randn(6, 4), "weight": torch.randn(5, 4), "bias": torch.randn(5), **changes})
    with refusal("linear", *named):
        (call.trainable() if trained else call)()
