"""ragged_gather: out[i] = weights[i] * x[index[i]] for i in [start, end) where index[i] >= 0, else 0."""

from typing import Any

import pytest
import torch

from maxmoe import ops, reference
from support.operator_calls import Call, assert_near, refusal, result, short
from support.operator_checks import MixedWeights, OperatorTests
from support.shapes import SKEWED, UNROUTED, Shape

NAN = float("nan")


def gather_call(shape: Shape) -> Call:
    """Every slot with an expert gathers a token; the first and the last slot are outside of [start, end)."""
    experts = shape.experts().flatten()
    tokens = torch.arange(len(experts)) * 7 % max(shape.num_tokens, 1)
    return Call(
        "ragged_gather",
        {
            "x": torch.randn(shape.num_tokens, shape.hidden_size, dtype=torch.float64),
            "index": torch.where(experts >= 0, tokens, -1),
            "weights": torch.randn(len(experts), dtype=torch.float64),
            "start": min(1, len(experts)),
            "end": max(len(experts) - 1, min(1, len(experts))),
        },
    )


class TestRaggedGather(MixedWeights, OperatorTests):
    def call(self, shape: Shape) -> Call:
        return gather_call(shape)


def test_without_weights_and_bounds(every_path: str) -> None:
    x = torch.randn(5, 3)
    index = torch.tensor([4, -1, 0, 4, 2])
    out = ops.ragged_gather(x, index)
    assert torch.equal(out, torch.stack([x[4], torch.zeros(3), x[0], x[4], x[2]]))
    assert torch.equal(ops.ragged_gather(x, index, torch.ones(5)), out)
    assert not ops.ragged_gather(x, index, start=3, end=3).any()


def test_adjoint_is_scatter_add(every_path: str) -> None:
    x, index, weights = (gather_call(UNROUTED).arguments[name] for name in ("x", "index", "weights"))
    y = torch.randn(len(index), x.shape[1], dtype=torch.float64)
    forward = (ops.ragged_gather(x, index, weights) * y).sum()
    transposed = (x * ops.ragged_scatter_add(y, index, len(x), weights=weights)).sum()
    torch.testing.assert_close(forward, transposed, rtol=1e-13, atol=1e-13)


def test_nan_of_nobody_stays_out(every_path: str) -> None:
    """NaN in rows and weights that are not read, and in upstream gradients of rows that are not written."""
    x = torch.randn(6, 4)
    x[[1, 5]] = NAN
    index = torch.tensor([5, 0, -1, 3, 0, 1])
    weights = torch.tensor([NAN, 2.0, NAN, 0.5, 1.0, NAN])
    cotangent = torch.randn(6, 4)
    cotangent[[0, 2, 5]] = NAN
    call = Call("ragged_gather", {"x": x, "index": index, "weights": weights, "start": 1, "end": 5})
    got = result(call, ops, [cotangent])
    expected = result(call, reference, [cotangent])
    assert got.outputs[0].isfinite().all()
    assert_near(got.outputs[0], expected.outputs[0], 1e-6, "output")
    for name in ("x", "weights"):
        gradient = got.gradients[name]
        assert gradient is not None and gradient.isfinite().all()
    assert got.gradients["weights"][[0, 2, 5]].tolist() == [0.0, 0.0, 0.0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.randn(5)}, ("x", "[N, D]", "[5]")),
        ({"x": torch.zeros(5, 3, dtype=torch.int64)}, ("x", "float64", "Long")),
        ({"index": torch.zeros(4, 1, dtype=torch.int64)}, ("index", "[M]", "[4, 1]")),
        ({"index": torch.zeros(4, dtype=torch.int32)}, ("index", "int64", "Int")),
        ({"index": torch.zeros(4)}, ("index", "int64", "Float")),
        ({"index": torch.tensor([0, 1, 2, 5])}, ("index", "5")),
        ({"index": torch.tensor([0, -2, 1, 1])}, ("index", "-1", "5", "-2")),
        ({"index": torch.zeros(4, dtype=torch.int64, device="meta")}, ("index", "cpu", "meta")),
        ({"weights": torch.zeros(3)}, ("weights", "4", "[3]")),
        ({"weights": torch.zeros(4, dtype=torch.int64)}, ("weights", "float64", "Long")),
        ({"weights": torch.zeros(4, device="meta")}, ("weights", "cpu", "meta")),
        ({"start": -1}, ("start", "-1")),
        ({"start": 3, "end": 2}, ("end", "3", "2")),
        ({"end": 5}, ("end", "4", "5")),
    ],
    ids=short,
)
def test_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    arguments = {"x": torch.randn(5, 3), "index": torch.zeros(4, dtype=torch.int64)}
    with refusal("ragged_gather", *named):
        ops.ragged_gather(**{**arguments, **changes})


def test_bounds_of_an_empty_table(every_path: str) -> None:
    """An index of -1 is valid for x without rows; any other index is an error."""
    x = torch.empty(0, 3)
    assert not ops.ragged_gather(x, torch.tensor([-1, -1])).any()
    with refusal("ragged_gather", "index", "0"):
        ops.ragged_gather(x, torch.tensor([-1, 0]))


def test_wide_result_of_16_bit_sums_is_rounded_once(every_path: str) -> None:
    """bfloat16 rows times float32 weights: the product is rounded, not the weight."""
    x = torch.full((1, 4), 3.0, dtype=torch.bfloat16)
    weights = torch.tensor([1.0 + 2**-12])
    out = ops.ragged_gather(x, torch.tensor([0]), weights)
    assert out.tolist() == (x.float() * weights).bfloat16().tolist()


def test_skewed_reuse_of_rows_has_the_summed_gradient(every_path: str) -> None:
    x = torch.randn(SKEWED.num_tokens, 4, dtype=torch.float64, requires_grad=True)
    index = torch.zeros(1000, dtype=torch.int64)
    ops.ragged_gather(x, index).sum().backward()
    assert x.grad is not None
    assert x.grad[0].tolist() == [1000.0] * 4
    assert not x.grad[1:].any()
