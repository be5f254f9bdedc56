"""Products of groups of rows with a matrix of each group (gmm, tgmm), and of all rows with one matrix (linear)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import ops, reference
from support.memory import saved_for_backward
from support.named import named
from support.operator_calls import (
    Call,
    assert_same,
    cotangents_of,
    expected_result,
    result,
    tolerance,
)
from support.operator_checks import (
    OperatorTests,
    UnreadElements,
    check_registrations,
)
from support.paths import emulated
from support.shapes import DTYPES, MANY_ROWS, ODD_WIDTHS, SEVERAL_BLOCKS, SKEWED, TINY, Shape


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def grouped(shape: Shape) -> tuple[Tensor, int, dict[str, Any]]:
    """Rows of all groups and three of no group, the number of local groups, and the arguments that say where they are.

    The first group is on another rank.
    """
    group_sizes = reference.ragged_plan(shape.experts(), shape.num_experts).group_sizes
    group_offset = 1 if shape.num_experts > 1 else 0
    lhs = random(int(group_sizes.sum()) + 3, shape.hidden_size)
    return lhs, shape.num_experts - group_offset, {"group_sizes": group_sizes, "group_offset": group_offset}


def of_others(call: Call) -> Tensor:
    """Whether a row is in no local group."""
    sizes, row = call.arguments["group_sizes"], torch.arange(len(call.arguments["lhs"]))
    return (row < sizes[0]) | (row >= sizes.sum())


class TestGmm(UnreadElements, OperatorTests):
    """out[r] = lhs[r] @ rhs[g - group_offset] + bias[g - group_offset] for the rows r of group g."""

    optional = ("rhs_bias",)

    def call(self, shape: Shape) -> Call:
        lhs, count, where = grouped(shape)
        rhs, bias = random(count, shape.hidden_size, shape.intermediate_size), random(count, shape.intermediate_size)
        return Call("gmm", {"lhs": lhs, "rhs": rhs, "rhs_bias": bias, **where})

    def unread(self, call: Call) -> dict[str, Tensor]:
        return {"lhs": of_others(call), "out": of_others(call)}


class TestTgmm(UnreadElements, OperatorTests):
    """out[g] = lhs_g^T rhs_g over the rows of local group g, the gradient of the matrices of gmm."""

    def call(self, shape: Shape) -> Call:
        lhs, count, where = grouped(shape)
        rhs = random(len(lhs), shape.intermediate_size)
        return Call("tgmm", {"lhs": lhs, "rhs": rhs, "num_local_groups": count, **where})

    def unread(self, call: Call) -> dict[str, Tensor]:
        return {"lhs": of_others(call), "rhs": of_others(call)}


class TestLinear(OperatorTests):
    """out = x @ weight^T + bias, summed in float32 or wider whatever the dtypes."""

    optional = ("bias",)

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def call(self, shape: Shape) -> Call:
        """The logits of a router."""
        arguments = {"x": random(shape.num_tokens, shape.hidden_size)}
        arguments |= {"weight": random(shape.num_experts, shape.hidden_size), "bias": random(shape.num_experts)}
        return Call("linear", arguments)


# Groups


@pytest.mark.parametrize("group_offset", [0, 3, 7, 8, 100, -1, -2, -100, 2**63 - 1, -(2**63)])
def test_any_offset(every_path: str, group_offset: int) -> None:
    """Rows of other groups and matrices of groups without rows are zero."""
    lhs, _, where = grouped(SKEWED)
    where["group_offset"] = group_offset
    for num_local_groups in (0, 1, 2, 20):
        rhs, bias = random(num_local_groups, SKEWED.hidden_size, 5), random(num_local_groups, 5)
        for call in (
            Call("gmm", {"lhs": lhs, "rhs": rhs, "rhs_bias": bias, **where}),
            Call("tgmm", {"lhs": lhs, "rhs": random(len(lhs), 5), "num_local_groups": num_local_groups, **where}),
        ):
            with named(call.operator, num_local_groups):
                assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


def test_matrices_of_empty_groups_are_not_read(every_path: str) -> None:
    lhs, sizes = torch.randn(5, 4), torch.tensor([2, 0, 3])
    projection = ops.Projection(torch.randn(3, 4, 6), torch.randn(3, 6))
    for tensor in projection[:2]:
        tensor[1] = float("nan")
    assert ops.gmm(lhs, projection, sizes).isfinite().all()


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_columns_on_either_side(every_path: str, sizes: tuple[int, int]) -> None:
    """A product over no columns is the bias."""
    D, F = sizes
    arguments = {"lhs": random(6, D), "group_sizes": torch.tensor([2, 3])}
    call = Call("gmm", {**arguments, "rhs": random(2, D, F), "rhs_bias": random(2, F)})
    assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))
    if 0 in sizes:  # nothing is allocated for 2^40 groups
        out = ops.tgmm(random(5, D), random(5, F), torch.tensor([2, 3]), 2**40)
        assert out.shape == (2**40, *sizes)


@emulated
def test_accumulates_in_float32(every_path: str) -> None:
    """512 ones: summed in bfloat16 the result would be 256."""
    lhs, rhs = torch.ones(2, 512, dtype=torch.bfloat16), torch.ones(1, 512, 3, dtype=torch.bfloat16)
    assert ops.gmm(lhs, rhs, torch.tensor([2])).tolist() == [[512.0] * 3] * 2
    for dtype in (torch.bfloat16, torch.float16):
        out = ops.tgmm(torch.ones(2048, 2, dtype=dtype) / 4, torch.ones(2048, 3, dtype=dtype), torch.tensor([2048]), 1)
        assert out.tolist() == [[[512.0] * 3] * 2]


# Any dtypes of linear

# Equal, each of the two wider, and both of 16 bits.
MIXES = [
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float16),
]


def mixed(call: Call, *dtypes: torch.dtype) -> Call:
    """Return the call with x and weight in these dtypes, and the bias in the dtype of the weight."""
    of_x, of_weight = dtypes
    given = call.arguments
    return call.replace(x=given["x"].to(of_x), weight=given["weight"].to(of_weight), bias=given["bias"].to(of_weight))


@pytest.mark.parametrize("dtypes", MIXES, ids=str)
@pytest.mark.parametrize("shape", [ODD_WIDTHS, MANY_ROWS], ids=str)
def test_any_dtypes(path: str, dtypes: tuple[torch.dtype, torch.dtype], shape: Shape) -> None:
    """The result has the precision of the sums; each gradient is rounded once to the dtype of its argument."""
    call = mixed(TestLinear().call(shape), *dtypes)
    got, expected = result(call), expected_result(call)
    sums = torch.promote_types(torch.promote_types(*dtypes), torch.float32)
    assert got.outputs[0].dtype == sums
    precision = tolerance(sums, 1)
    torch.testing.assert_close(got.outputs[0].double(), expected.outputs[0], rtol=precision, atol=10 * precision)
    for name, gradient in got.gradients.items():
        dtype, exact = call.arguments[name].dtype, expected.gradients[name]
        assert gradient is not None and exact is not None and gradient.dtype == dtype
        rtol, atol = 1.01 * torch.finfo(dtype).eps / 2 + precision, 50 * precision + torch.finfo(dtype).tiny
        torch.testing.assert_close(gradient.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_any_result(path: str, out_dtype: torch.dtype) -> None:
    for dtype in DTYPES:
        call = TestLinear().call(SEVERAL_BLOCKS).cast(dtype).replace(out_dtype=out_dtype)
        got = result(call)
        assert got.outputs[0].dtype == out_dtype
        wide = max(torch.finfo(dtype).eps, torch.finfo(out_dtype).eps, key=float)
        with named(dtype):
            assert_same(got, expected_result(call.replace(out_dtype=None)), 32 * wide)


def test_gradients_are_not_rounded(path: str) -> None:
    """grad is not rounded to 16 bits before products, and the sum over rows is not rounded in between."""
    x = torch.full((3000, 1), 0.5, dtype=torch.bfloat16)
    weight = torch.ones(2, 1, dtype=torch.bfloat16, requires_grad=True)
    ops.linear(x, weight).backward(torch.full((3000, 2), 1 + 2.0**-12))
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2, 1), 1500 * (1 + 2.0**-12)).bfloat16())


def test_mixed_dtypes_have_derivatives(path: str) -> None:
    """The gradient of x is grad @ weight; the gradient of <grad_x, u> with respect to the weight is grad^T @ u."""
    call = mixed(TestLinear().call(TINY), torch.bfloat16, torch.float32)
    check_registrations(call)
    call = mixed(TestLinear().call(TINY), torch.float32, torch.bfloat16).trainable()
    out, (grad,) = call()[0], cotangents_of(call())
    (grad_x,) = torch.autograd.grad(out, call.arguments["x"], grad, create_graph=True)
    u = torch.randn_like(grad_x)
    (grad_weight,) = torch.autograd.grad(grad_x, call.arguments["weight"], u)
    assert grad_weight.dtype == torch.bfloat16
    torch.testing.assert_close(grad_weight, (grad.t() @ u).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_leaves_linear(path: str, dtype: torch.dtype) -> None:
    call = TestLinear().call(SKEWED).cast(torch.float32)
    expected = result(call)
    with torch.autocast("cpu", dtype=dtype):
        got = result(call)
    assert got.outputs[0].dtype == torch.float32
    assert_same(got, expected)


# Rows and memory of linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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
    call = Call("linear", {"x": random(num_rows, inner), "weight": random(columns, inner), "bias": random(columns)})
    assert_same(result(call), result(call, reference), 1e-6)


def test_nothing_to_multiply_in_any_layout(path: str) -> None:
    """Tensors without elements may have any strides: a slice, an expanded gradient of no rows."""
    x = torch.zeros(4, 8, dtype=torch.bfloat16)[:, 0:0:2]
    assert torch.equal(ops.linear(x, torch.zeros(5, 0)), torch.zeros(4, 5))
    weight = torch.ones(5, 3, dtype=torch.bfloat16, requires_grad=True)
    ops.linear(torch.zeros(0, 3, dtype=torch.bfloat16), weight, out_dtype=torch.bfloat16).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_saves_the_matrices_as_they_are(path: str) -> None:
    call = mixed(TestLinear().call(SKEWED), torch.bfloat16, torch.float32).trainable()
    with saved_for_backward() as saved:
        call()
    assert {tensor.data_ptr() for tensor in saved} == {tensor.data_ptr() for tensor in call.tensors().values()}


def test_a_bias_alone_needs_no_input(path: str) -> None:
    """Beside a frozen weight, the backward of a trained bias reads neither x nor the weight."""
    call = TestLinear().call(SKEWED).cast(torch.float32)
    call.arguments["bias"].requires_grad_()
    with saved_for_backward() as saved:
        call()
    assert {tensor.numel() for tensor in saved} == {0, call.arguments["bias"].numel()}
