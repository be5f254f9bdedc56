"""ragged_dot: out[j] = <a[j // group_size], b[index[j]]>, 0 where index[j] < 0."""

from typing import Any

import pytest
import torch

from maxmoe import ops, reference
from support.operator_calls import Call, assert_same, refusal, result, short
from support.operator_checks import OperatorTests
from support.shapes import SKEWED, Shape

NAN = float("nan")


def dot_call(shape: Shape) -> Call:
    """Every token with one vector of each of its K experts."""
    return Call(
        "ragged_dot",
        {
            "a": torch.randn(shape.num_tokens, shape.hidden_size, dtype=torch.float64),
            "b": torch.randn(shape.num_experts, shape.hidden_size, dtype=torch.float64),
            "index": shape.experts().flatten(),
            "group_size": shape.top_k,
        },
    )


class TestRaggedDot(OperatorTests):
    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The gradient of weights, which may be float32 beside 16 bit rows."""
        return torch.promote_types(dtype, torch.float32)

    def call(self, shape: Shape) -> Call:
        return dot_call(shape)


def test_group_size_is_one_by_default(every_path: str) -> None:
    a, b = torch.randn(3, 4), torch.randn(2, 4)
    out = ops.ragged_dot(a, b, torch.tensor([1, -1, 0]))
    torch.testing.assert_close(out, torch.stack([a[0] @ b[1], torch.zeros(()), a[2] @ b[0]]))


def test_is_the_gradient_of_the_weights(every_path: str) -> None:
    arguments = dot_call(SKEWED).arguments
    y, rows, index = arguments["a"], arguments["b"], arguments["index"]
    weights = torch.randn(len(index), dtype=torch.float64, requires_grad=True)
    ops.ragged_gather_reduce(rows, index, SKEWED.top_k, weights).backward(y)
    assert weights.grad is not None
    torch.testing.assert_close(ops.ragged_dot(**arguments), weights.grad, rtol=1e-13, atol=1e-13)


def test_nan_of_nobody_stays_out(every_path: str) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 4)
    a[1], b[2] = NAN, NAN
    index = torch.tensor([0, 3, -1, -1, -1, 1])
    cotangent = torch.tensor([1.0, -2.0, NAN, NAN, NAN, 0.5])
    call = Call("ragged_dot", {"a": a, "b": b, "index": index, "group_size": 2})
    got = result(call, ops, [cotangent])
    assert got.outputs[0].isfinite().all()
    for gradient in got.gradients.values():
        assert gradient is not None and gradient.isfinite().all()
    assert_same(got, result(call, reference, [cotangent]), 1e-6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"a": torch.randn(3)}, ("a", "D]", "[3]")),
        ({"a": torch.randn(2, 5)}, ("index", "4", "rows of a", "[6]")),
        ({"a": torch.zeros(3, 5, dtype=torch.int64)}, ("a", "float64", "Long")),
        ({"b": torch.randn(7)}, ("b", "[N, D]", "[7]")),
        ({"b": torch.randn(7, 4)}, ("b", "5", "[7, 4]")),
        ({"b": torch.randn(7, 5, dtype=torch.float64)}, ("b", "Float", "Double")),
        ({"b": torch.randn(7, 5, device="meta")}, ("b", "cpu", "meta")),
        ({"index": torch.zeros(2, 3, dtype=torch.int64)}, ("index", "[M]", "[2, 3]")),
        ({"index": torch.zeros(6, dtype=torch.uint8)}, ("index", "int64", "Byte")),
        ({"index": torch.full((6,), 7)}, ("index", "7")),
        ({"index": torch.full((6,), -3)}, ("index", "-1", "7", "-3")),
        ({"group_size": 0}, ("group_size", "0")),
        ({"group_size": 4}, ("index", "12", "group_size", "[6]")),
    ],
    ids=short,
)
def test_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    arguments = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7, 5),
        "index": torch.zeros(6, dtype=torch.int64),
        "group_size": 2,
    }
    with refusal("ragged_dot", *named):
        ops.ragged_dot(**{**arguments, **changes})
