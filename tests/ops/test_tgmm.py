"""tgmm: out[g] = lhs_g^T rhs_g over the rows of local group g, the gradient of the matrices of gmm."""

from typing import Any

import pytest
import torch

from maxmoe import ops, reference
from support.operator_calls import Call, assert_same, refusal, result, short, tolerance
from support.operator_checks import OperatorTests
from support.shapes import EMPTY_EXPERTS, SKEWED, Shape

NAN = float("nan")


def tgmm_call(shape: Shape) -> Call:
    """The matrices of all groups but the first, and three rows of no group."""
    group_sizes = reference.ragged_plan(shape.experts(), shape.num_experts).group_sizes
    group_offset = 1 if shape.num_experts > 1 else 0
    num_rows = int(group_sizes.sum()) + 3
    return Call(
        "tgmm",
        {
            "lhs": torch.randn(num_rows, shape.hidden_size, dtype=torch.float64),
            "rhs": torch.randn(num_rows, shape.intermediate_size, dtype=torch.float64),
            "group_sizes": group_sizes,
            "num_local_groups": shape.num_experts - group_offset,
            "group_offset": group_offset,
        },
    )


class TestTgmm(OperatorTests):
    def call(self, shape: Shape) -> Call:
        return tgmm_call(shape)


def test_is_the_gradient_of_gmm(every_path: str) -> None:
    """<gmm(lhs, W), y> = <W, tgmm(lhs, y)>."""
    arguments = tgmm_call(SKEWED).arguments
    lhs, y, sizes = arguments["lhs"], arguments["rhs"], arguments["group_sizes"]
    matrices = torch.randn(SKEWED.num_experts, lhs.shape[1], y.shape[1], dtype=torch.float64)
    forward = (ops.gmm(lhs, matrices, sizes) * y).sum()
    transposed = (matrices * ops.tgmm(lhs, y, sizes, SKEWED.num_experts)).sum()
    torch.testing.assert_close(forward, transposed, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("group_offset", [0, 3, 7, 8, 100, -1, -100])
@pytest.mark.parametrize("num_local_groups", [0, 1, 2, 20])
def test_any_offset(every_path: str, num_local_groups: int, group_offset: int) -> None:
    call = tgmm_call(SKEWED).replace(num_local_groups=num_local_groups, group_offset=group_offset)
    assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


def test_empty_groups_are_zero(every_path: str) -> None:
    call = tgmm_call(EMPTY_EXPERTS)
    out = call()[0]
    empty = call.arguments["group_sizes"][1:] == 0
    assert empty.any()
    assert not out[empty].any()


def test_nan_of_nobody_stays_out(every_path: str) -> None:
    call = tgmm_call(SKEWED)
    sizes = call.arguments["group_sizes"]
    nobody = torch.ones(len(call.arguments["lhs"]), dtype=torch.bool)
    nobody[sizes[0] : sizes.sum()] = False
    lhs, rhs = call.arguments["lhs"].clone(), call.arguments["rhs"].clone()
    lhs[nobody] = NAN
    rhs[nobody] = NAN
    call = call.replace(lhs=lhs, rhs=rhs)
    got = result(call)
    for value in (got.outputs[0], *got.gradients.values()):
        assert value is not None and value.isfinite().all()
    assert_same(got, result(call, reference), tolerance(torch.float64, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accumulates_in_float32(every_path: str, dtype: torch.dtype) -> None:
    lhs = torch.ones(2048, 2, dtype=dtype) / 4
    out = ops.tgmm(lhs, torch.ones(2048, 3, dtype=dtype), torch.tensor([2048]), 1)
    assert out.tolist() == [[[512.0] * 3] * 2]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lhs": torch.randn(6)}, ("lhs", "[R, D]", "[6]")),
        ({"lhs": torch.zeros(6, 4, dtype=torch.int64)}, ("lhs", "float64", "Long")),
        ({"rhs": torch.randn(6)}, ("rhs", "[R, F]", "[6]")),
        ({"rhs": torch.randn(5, 3)}, ("rhs", "6", "[5, 3]")),
        ({"rhs": torch.randn(6, 3, dtype=torch.float64)}, ("rhs", "lhs", "Float", "Double")),
        ({"rhs": torch.randn(6, 3, device="meta")}, ("rhs", "cpu", "meta")),
        ({"group_sizes": torch.zeros(2, 2, dtype=torch.int64)}, ("group_sizes", "[G]", "[2, 2]")),
        ({"group_sizes": torch.zeros(2)}, ("group_sizes", "int64", "Float")),
        ({"group_sizes": torch.tensor([3, -1])}, ("group_sizes", "negative", "-1")),
        ({"group_sizes": torch.tensor([3, 4])}, ("group_sizes", "6", "4")),
        ({"num_local_groups": -1}, ("num_local_groups", "-1")),
    ],
    ids=short,
)
def test_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    arguments = {
        "lhs": torch.randn(6, 4),
        "rhs": torch.randn(6, 3),
        "group_sizes": torch.tensor([2, 3]),
        "num_local_groups": 2,
    }
    with refusal("tgmm", *named):
        ops.tgmm(**{**arguments, **changes})
