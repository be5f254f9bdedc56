"""ragged_gather_reduce: out[t] = sum of weights[j] * rows[index[j]] over the valid j of group t."""

from typing import Any

import pytest
import torch

from maxmoe import ops, reference
from support.operator_calls import Call, assert_same, refusal, result, short
from support.operator_checks import MixedWeights, OperatorTests
from support.shapes import UNROUTED, Shape

NAN = float("nan")


def gather_reduce_call(shape: Shape) -> Call:
    """The rows of a plan go back to their tokens; every seventh slot is not valid."""
    plan = reference.ragged_plan(shape.experts(), shape.num_experts)
    return Call(
        "ragged_gather_reduce",
        {
            "rows": torch.randn(len(plan.slots), shape.hidden_size, dtype=torch.float64),
            "index": plan.rows,
            "group_size": shape.top_k,
            "weights": torch.randn(len(plan.rows), dtype=torch.float64),
            "valid": torch.arange(len(plan.rows)) % 7 != 6,
        },
    )


class TestRaggedGatherReduce(MixedWeights, OperatorTests):
    def call(self, shape: Shape) -> Call:
        return gather_reduce_call(shape)


def test_without_weights_and_mask(every_path: str) -> None:
    rows = torch.randn(4, 3)
    index = torch.tensor([3, 0, -1, -1, 2, 2])
    out = ops.ragged_gather_reduce(rows, index, 2)
    torch.testing.assert_close(out, torch.stack([rows[3] + rows[0], torch.zeros(3), 2 * rows[2]]))
    assert torch.equal(ops.ragged_gather_reduce(rows, index, 2, torch.ones(6)), out)
    assert torch.equal(ops.ragged_gather_reduce(rows, index, 2, valid=torch.ones(6, dtype=torch.bool)), out)


def test_adjoint_is_scatter_add(every_path: str) -> None:
    arguments = gather_reduce_call(UNROUTED).arguments
    rows, index, weights = arguments["rows"], arguments["index"], arguments["weights"]
    y = torch.randn(UNROUTED.num_tokens, rows.shape[1], dtype=torch.float64)
    forward = (ops.ragged_gather_reduce(rows, index, UNROUTED.top_k, weights) * y).sum()
    transposed = ops.ragged_scatter_add(y, index, len(rows), UNROUTED.top_k, weights)
    torch.testing.assert_close(forward, (rows * transposed).sum(), rtol=1e-13, atol=1e-13)


def test_adjoint_of_gather_for_a_permutation(every_path: str) -> None:
    """Where every row is used once, gather by the inverse permutation is the transpose."""
    permutation = torch.randperm(12)
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)
    forward = (ops.ragged_gather(x, permutation) * y).sum()
    transposed = (x * ops.ragged_gather_reduce(y, permutation.argsort(), 1)).sum()
    torch.testing.assert_close(forward, transposed, rtol=1e-13, atol=1e-13)


def test_nan_of_nobody_stays_out(every_path: str) -> None:
    rows = torch.randn(5, 4)
    rows[[1, 4]] = NAN
    arguments = {
        "rows": rows,
        "index": torch.tensor([0, -1, 2, 4, -1, -1, 3, 2]),
        "group_size": 2,
        "weights": torch.tensor([0.5, NAN, 2.0, NAN, NAN, NAN, 1.0, 1.5]),
        "valid": torch.tensor([True, True, True, False, True, False, True, True]),
    }
    cotangent = torch.randn(4, 4)
    cotangent[2] = NAN
    call = Call("ragged_gather_reduce", arguments)
    got = result(call, ops, [cotangent])
    assert got.outputs[0].isfinite().all()
    for gradient in got.gradients.values():
        assert gradient is not None and gradient.isfinite().all()
    assert_same(got, result(call, reference, [cotangent]), 1e-6)


def test_sums_in_float32(every_path: str) -> None:
    """256 + 1 + ... + 1 stays 256 when it is added up in bfloat16."""
    rows = torch.ones(257, 3, dtype=torch.bfloat16)
    rows[0] = 256
    out = ops.ragged_gather_reduce(rows, torch.arange(257), 257)
    assert out.tolist() == [[512.0] * 3]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows": torch.randn(5)}, ("rows", "[R, D]", "[5]")),
        ({"rows": torch.zeros(5, 3, dtype=torch.bool)}, ("rows", "float64", "Bool")),
        ({"index": torch.zeros(6, 1, dtype=torch.int64)}, ("index", "[M]", "[6, 1]")),
        ({"index": torch.zeros(6, dtype=torch.int32)}, ("index", "int64", "Int")),
        ({"index": torch.full((6,), 5)}, ("index", "5")),
        ({"index": torch.full((6,), -7)}, ("index", "-1", "5", "-7")),
        ({"index": torch.zeros(6, dtype=torch.int64, device="meta")}, ("index", "cpu", "meta")),
        ({"group_size": 4}, ("group_size", "4", "6")),
        ({"group_size": 0}, ("group_size", "0")),
        ({"group_size": -2}, ("group_size", "-2")),
        ({"weights": torch.zeros(3)}, ("weights", "6", "[3]")),
        ({"weights": torch.zeros(6, dtype=torch.int64)}, ("weights", "float64", "Long")),
        ({"valid": torch.ones(5, dtype=torch.bool)}, ("valid", "6", "[5]")),
        ({"valid": torch.ones(6)}, ("valid", "bool", "Float")),
        ({"valid": torch.ones(6, dtype=torch.bool, device="meta")}, ("valid", "cpu", "meta")),
    ],
    ids=short,
)
def test_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    arguments = {"rows": torch.randn(5, 3), "index": torch.zeros(6, dtype=torch.int64), "group_size": 2}
    with refusal("ragged_gather_reduce", *named):
        ops.ragged_gather_reduce(**{**arguments, **changes})


def test_rows_without_slots_stay_out(every_path: str) -> None:
    """Neither a group without rows nor a slot without a row reads the first row, which is NaN."""
    rows = torch.full((3, 4), NAN)
    rows[1] = 2.0
    out = ops.ragged_gather_reduce(rows, torch.tensor([-1, -1, 1, -1, -1, 1]), 2, torch.full((6,), 0.5))
    assert torch.equal(out, torch.tensor([0.0, 1.0, 1.0]).unsqueeze(1).expand(3, 4))
    assert not ops.ragged_gather_reduce(rows, torch.full((6,), -1), 2).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_in_float32_are_not_rounded(every_path: str, dtype: torch.dtype) -> None:
    """The sum in float32 is rounded once, to the dtype of the rows. Rounded weights give an error of 0.28 eps."""
    rows, weights = torch.randn(1024, 32).to(dtype), torch.rand(1024)
    index = torch.randperm(1024)
    exact = (rows.double()[index] * weights.double().unsqueeze(1)).view(512, 2, 32).sum(1)
    error = ops.ragged_gather_reduce(rows, index, 2, weights) - exact
    assert error.norm() < 0.24 * torch.finfo(dtype).eps * exact.norm()
