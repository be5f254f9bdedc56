"""gmm: out[r] = lhs[r] @ rhs[g - group_offset] + bias[g - group_offset] for the rows r of group g."""

from typing import Any

import pytest
import torch

from maxmoe import ops, reference
from support.operator_calls import Call, assert_same, expected_result, refusal, result, short, tolerance
from support.operator_checks import OperatorTests, check_compile, compile_whole
from support.shapes import ALL_TO_ONE, EMPTY_EXPERTS, ODD_WIDTHS, SEVERAL_BLOCKS, SKEWED, Shape, each_shape

NAN = float("nan")


def gmm_call(shape: Shape) -> Call:
    """Rows of all experts, whose first matrix is on another rank, and three rows of no group."""
    group_sizes = reference.ragged_plan(shape.experts(), shape.num_experts).group_sizes
    group_offset = 1 if shape.num_experts > 1 else 0
    num_local = shape.num_experts - group_offset
    num_rows = int(group_sizes.sum()) + 3
    return Call(
        "gmm",
        {
            "lhs": torch.randn(num_rows, shape.hidden_size, dtype=torch.float64),
            "rhs": torch.randn(num_local, shape.hidden_size, shape.intermediate_size, dtype=torch.float64),
            "group_sizes": group_sizes,
            "rhs_bias": torch.randn(num_local, shape.intermediate_size, dtype=torch.float64),
            "group_offset": group_offset,
        },
    )


class TestGmm(OperatorTests):
    def call(self, shape: Shape) -> Call:
        return gmm_call(shape)


@each_shape
def test_without_bias_and_offset(every_path: str, shape: Shape) -> None:
    call = gmm_call(shape)
    rhs = torch.randn(shape.num_experts, shape.hidden_size, shape.intermediate_size, dtype=torch.float64)
    call = call.replace(rhs=rhs, rhs_bias=None, group_offset=0)
    assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


@pytest.mark.parametrize("group_offset", [0, 3, 7, 8, 100, -1, -2, -100])
def test_any_offset(every_path: str, group_offset: int) -> None:
    """The rows of groups before the offset and past the local groups are zero."""
    call = gmm_call(SKEWED).replace(
        rhs=torch.randn(2, SKEWED.hidden_size, 5, dtype=torch.float64),
        rhs_bias=torch.randn(2, 5, dtype=torch.float64),
        group_offset=group_offset,
    )
    assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [ODD_WIDTHS, SEVERAL_BLOCKS], ids=str)
def test_transposed_rhs_as_a_view(every_path: str, shape: Shape, dtype: torch.dtype) -> None:
    call = gmm_call(shape).cast(dtype)
    rhs = call.arguments["rhs"].transpose(1, 2).contiguous().transpose(1, 2)
    assert not rhs.is_contiguous()
    assert_same(result(call.replace(rhs=rhs)), expected_result(call), tolerance(dtype, 1))


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_columns_on_either_side(every_path: str, sizes: tuple[int, int]) -> None:
    """A product over no columns is the bias."""
    hidden_size, intermediate_size = sizes
    call = Call(
        "gmm",
        {
            "lhs": torch.randn(6, hidden_size, dtype=torch.float64),
            "rhs": torch.randn(2, hidden_size, intermediate_size, dtype=torch.float64),
            "group_sizes": torch.tensor([2, 3]),
            "rhs_bias": torch.randn(2, intermediate_size, dtype=torch.float64),
        },
    )
    assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


def test_nan_of_nobody_stays_out(every_path: str) -> None:
    """NaN in rows of other groups and past the last one, in their upstream gradients, in matrices of empty groups."""
    call = gmm_call(EMPTY_EXPERTS)
    sizes = call.arguments["group_sizes"]
    end = int(sizes.sum())
    lhs, rhs, bias = (call.arguments[name].clone() for name in ("lhs", "rhs", "rhs_bias"))
    lhs[: sizes[0]] = NAN
    lhs[end:] = NAN
    rhs[sizes[1:] == 0] = NAN
    bias[sizes[1:] == 0] = NAN
    cotangent = torch.randn(len(lhs), rhs.shape[2], dtype=torch.float64)
    cotangent[: sizes[0]] = NAN
    cotangent[end:] = NAN
    call = call.replace(lhs=lhs, rhs=rhs, rhs_bias=bias)
    got = result(call, ops, [cotangent])
    assert not got.outputs[0][end:].any()
    for value in (got.outputs[0], *got.gradients.values()):
        assert value is not None and value.isfinite().all()
    assert_same(got, result(call, reference, [cotangent]), tolerance(torch.float64, 1))


def test_rows_of_other_groups_are_zero_with_a_bias_too(every_path: str) -> None:
    call = gmm_call(ALL_TO_ONE).replace(group_offset=3, rhs=torch.ones(1, 8, 5).double())
    out = call.replace(rhs_bias=torch.ones(1, 5).double())()[0]
    assert not out.any()


def test_accumulates_in_float32(every_path: str) -> None:
    """512 ones: summed in bfloat16 the result would be 256."""
    lhs = torch.ones(2, 512, dtype=torch.bfloat16)
    rhs = torch.ones(1, 512, 3, dtype=torch.bfloat16)
    assert ops.gmm(lhs, rhs, torch.tensor([2])).tolist() == [[512.0] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(path: str, dtype: torch.dtype) -> None:
    call = gmm_call(SKEWED).cast(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        got = result(call, ops, [torch.ones((), dtype=dtype).expand(len(call.arguments["lhs"]), 6)])
    assert got.outputs[0].dtype == dtype
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in got.gradients.values())
    low = call.cast(dtype)
    expected = result(low, ops, [torch.ones((), dtype=dtype).expand(len(call.arguments["lhs"]), 6)])
    assert_same(got, expected)


@pytest.mark.sampled(1)
def test_compiles_with_inductor(path: str) -> None:
    check_compile(gmm_call(SKEWED), "inductor")


def test_compiles_under_autocast(path: str) -> None:
    arguments = gmm_call(SKEWED).cast(torch.float32).with_projections()
    compiled = compile_whole(ops.gmm, "aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(**arguments), ops.gmm(**arguments))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lhs": torch.randn(6)}, ("lhs", "[R, D]", "[6]")),
        ({"lhs": torch.zeros(6, 4, dtype=torch.int64)}, ("lhs", "float64", "Long")),
        ({"rhs": torch.randn(4, 5)}, ("rhs", "[L, D, F]", "[4, 5]")),
        ({"rhs": torch.randn(2, 3, 5)}, ("rhs", "4", "[2, 3, 5]")),
        ({"rhs": torch.randn(2, 4, 5, dtype=torch.float64)}, ("rhs", "lhs", "Float", "Double")),
        ({"rhs": torch.randn(2, 4, 5, device="meta")}, ("rhs", "cpu", "meta")),
        ({"group_sizes": torch.zeros(2, 2, dtype=torch.int64)}, ("group_sizes", "[G]", "[2, 2]")),
        ({"group_sizes": torch.zeros(2, dtype=torch.int32)}, ("group_sizes", "int64", "Int")),
        ({"group_sizes": torch.zeros(2, dtype=torch.int64, device="meta")}, ("group_sizes", "cpu", "meta")),
        ({"group_sizes": torch.tensor([3, -1])}, ("group_sizes", "negative", "-1")),
        ({"group_sizes": torch.tensor([3, 4])}, ("group_sizes", "6", "4")),
        ({"group_sizes": torch.tensor([2**62, 2**62, 2**62])}, ("group_sizes", "6", str(2**62))),
        ({"rhs_bias": torch.randn(5)}, ("rhs_bias", "[L, F]", "[5]")),
        ({"rhs_bias": torch.randn(3, 5)}, ("rhs_bias", "2", "[3, 5]")),
        ({"rhs_bias": torch.randn(2, 4)}, ("rhs_bias", "5", "[2, 4]")),
        ({"rhs_bias": torch.randn(2, 5, dtype=torch.float64)}, ("rhs_bias", "lhs", "Float", "Double")),
    ],
    ids=short,
)
def test_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    arguments = {
        "lhs": torch.randn(6, 4),
        "rhs": torch.randn(2, 4, 5),
        "group_sizes": torch.tensor([2, 3]),
    }
    with refusal("gmm", *named):
        Call("gmm", {**arguments, **changes})()
