"""ragged_scatter_add: out[n] = sum of weights[j] * rows[j // group_size] over the j where index[j] == n."""

from typing import Any

import pytest
import torch

from maxmoe import ops, reference
from support.operator_calls import Call, assert_same, refusal, result, short
from support.operator_checks import MixedWeights, OperatorTests
from support.shapes import SKEWED, Shape

NAN = float("nan")


def scatter_add_call(shape: Shape) -> Call:
    """Every token is added to its K experts; some experts get many rows."""
    index = shape.experts().flatten()
    return Call(
        "ragged_scatter_add",
        {
            "rows": torch.randn(shape.num_tokens, shape.hidden_size, dtype=torch.float64),
            "index": index,
            "num_rows": shape.num_experts,
            "group_size": shape.top_k,
            "weights": torch.randn(len(index), dtype=torch.float64),
        },
    )


class TestRaggedScatterAdd(MixedWeights, OperatorTests):
    def call(self, shape: Shape) -> Call:
        return scatter_add_call(shape)


def test_without_weights(every_path: str) -> None:
    rows = torch.randn(3, 4)
    out = ops.ragged_scatter_add(rows, torch.tensor([2, 0, 2]), 4)
    torch.testing.assert_close(out, torch.stack([rows[1], torch.zeros(4), rows[0] + rows[2], torch.zeros(4)]))


def test_no_rows_to_write_to(every_path: str) -> None:
    rows = torch.randn(3, 4)
    assert ops.ragged_scatter_add(rows, torch.tensor([-1, -1, -1]), 0).shape == (0, 4)
    with refusal("ragged_scatter_add", "index", "0"):
        ops.ragged_scatter_add(rows, torch.tensor([-1, 0, -1]), 0)


def test_is_the_sum_that_index_add_makes(every_path: str) -> None:
    arguments = scatter_add_call(SKEWED).arguments
    index, weights = arguments["index"], arguments["weights"]
    weighted = arguments["rows"].repeat_interleave(SKEWED.top_k, 0) * weights[:, None]
    expected = torch.zeros(SKEWED.num_experts, SKEWED.hidden_size, dtype=torch.float64)
    expected.index_add_(0, index, weighted)
    torch.testing.assert_close(ops.ragged_scatter_add(**arguments), expected)


def test_nan_of_nobody_stays_out(every_path: str) -> None:
    rows = torch.randn(4, 3)
    rows[2] = NAN
    weights = torch.tensor([1.0, NAN, 2.0, 3.0, NAN, NAN, 0.5, 0.5])
    index = torch.tensor([0, -1, 2, 2, -1, -1, 0, 2])
    cotangent = torch.randn(4, 3)
    cotangent[[1, 3]] = NAN
    call = Call(
        "ragged_scatter_add",
        {"rows": rows, "index": index, "num_rows": 4, "group_size": 2, "weights": weights},
    )
    got = result(call, ops, [cotangent])
    assert got.outputs[0].isfinite().all()
    for gradient in got.gradients.values():
        assert gradient is not None and gradient.isfinite().all()
    assert_same(got, result(call, reference, [cotangent]), 1e-6)


def test_sums_in_float32(every_path: str) -> None:
    rows = torch.ones(257, 3, dtype=torch.bfloat16)
    rows[0] = 256
    out = ops.ragged_scatter_add(rows, torch.zeros(257, dtype=torch.int64), 1)
    assert out.tolist() == [[512.0] * 3]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows": torch.randn(3)}, ("rows", "D]", "[3]")),
        ({"rows": torch.randn(4, 5)}, ("index", "8", "rows", "[6]")),
        ({"rows": torch.zeros(3, 5, dtype=torch.int64)}, ("rows", "float64", "Long")),
        ({"index": torch.zeros(2, 3, dtype=torch.int64)}, ("index", "[M]", "[2, 3]")),
        ({"index": torch.zeros(6, dtype=torch.int16)}, ("index", "int64", "Short")),
        ({"index": torch.full((6,), 7)}, ("index", "7")),
        ({"index": torch.full((6,), -2)}, ("index", "-1", "7", "-2")),
        ({"index": torch.zeros(6, dtype=torch.int64, device="meta")}, ("index", "cpu", "meta")),
        ({"num_rows": -1}, ("num_rows", "-1")),
        ({"group_size": 0}, ("group_size", "0")),
        ({"group_size": 4}, ("index", "12", "group_size", "[6]")),
        ({"weights": torch.zeros(5)}, ("weights", "6", "[5]")),
        ({"weights": torch.zeros(6, dtype=torch.int64)}, ("weights", "float64", "Long")),
    ],
    ids=short,
)
def test_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    arguments = {
        "rows": torch.randn(3, 5),
        "index": torch.zeros(6, dtype=torch.int64),
        "num_rows": 7,
        "group_size": 2,
    }
    with refusal("ragged_scatter_add", *named):
        ops.ragged_scatter_add(**{**arguments, **changes})
