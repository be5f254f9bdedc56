"""ragged_sort: rows[r] = weights.flat[slots[r]] * x[slots[r] // K]."""

from typing import Any

import pytest
import torch

from maxmoe import ops, reference
from support.operator_calls import Call, assert_same, refusal, result, short
from support.operator_checks import MixedWeights, OperatorTests, check_compile
from support.shapes import BALANCED, SKEWED, UNROUTED, Shape

NAN = float("nan")


def sort_call(shape: Shape) -> Call:
    return Call(
        "ragged_sort",
        {
            "x": torch.randn(shape.num_tokens, shape.hidden_size, dtype=torch.float64),
            "plan": ops.ragged_plan(shape.experts(), shape.num_experts),
            "weights": torch.randn(shape.num_tokens, shape.top_k, dtype=torch.float64),
        },
    )


class TestRaggedSort(MixedWeights, OperatorTests):
    def call(self, shape: Shape) -> Call:
        return sort_call(shape)


def test_without_weights(every_path: str) -> None:
    call = sort_call(SKEWED)
    ones = torch.ones_like(call.arguments["weights"])
    assert torch.equal(call.replace(weights=None)()[0], call.replace(weights=ones)()[0])
    assert_same(result(call.replace(weights=None)), result(call.replace(weights=None), reference), 1e-14)


@pytest.mark.parametrize("max_rows", [0, 5, 20])
def test_of_a_share_of_the_experts_cut_at_max_rows(every_path: str, max_rows: int) -> None:
    plan = ops.ragged_plan(SKEWED.experts(), 8, first_expert=1, num_local_experts=4, max_rows=max_rows)
    call = sort_call(SKEWED).replace(plan=plan)
    assert call()[0].shape == (max_rows, SKEWED.hidden_size)
    assert_same(result(call), result(call, reference), 1e-14)


def test_sort_then_unsort_is_k_times_the_identity(every_path: str) -> None:
    x = torch.randn(BALANCED.num_tokens, BALANCED.hidden_size)
    plan = ops.ragged_plan(BALANCED.experts(), BALANCED.num_experts)
    assert torch.equal(ops.ragged_unsort(ops.ragged_sort(x, plan), plan), BALANCED.top_k * x)
    halves = torch.full((BALANCED.num_tokens, BALANCED.top_k), 1 / BALANCED.top_k)
    assert torch.equal(ops.ragged_unsort(ops.ragged_sort(x, plan), plan, halves), x)


def test_adjoint_is_unsort(every_path: str) -> None:
    x, plan, weights = (sort_call(UNROUTED).arguments[name] for name in ("x", "plan", "weights"))
    y = torch.randn(len(plan.slots), x.shape[1], dtype=torch.float64)
    forward = (ops.ragged_sort(x, plan, weights) * y).sum()
    transposed = (x * ops.ragged_unsort(y, plan, weights)).sum()
    torch.testing.assert_close(forward, transposed, rtol=1e-13, atol=1e-13)


def test_nan_of_nobody_stays_out(every_path: str) -> None:
    """NaN in tokens without an expert, and in weights of slots without one."""
    call = sort_call(UNROUTED)
    experts = UNROUTED.experts()
    x, weights = call.arguments["x"].clone(), call.arguments["weights"].clone()
    x[(experts < 0).all(1)] = NAN
    weights[experts < 0] = NAN
    assert x.isnan().any() and weights.isnan().any()
    call = call.replace(x=x, weights=weights)
    got = result(call)
    assert got.outputs[0].isfinite().all()
    for gradient in got.gradients.values():
        assert gradient is not None and gradient.isfinite().all()
    assert_same(got, result(call, reference), 1e-14)


def test_compiles_with_inductor(path: str) -> None:
    check_compile(sort_call(SKEWED), "inductor")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.randn(20)}, ("x", "[T, D]", "[20]")),
        ({"x": torch.randn(19, 4)}, ("60", "57")),
        ({"x": torch.zeros(20, 4, dtype=torch.int64)}, ("x", "float64", "Long")),
        ({"weights": torch.zeros(20, 2)}, ("weights", "60", "[20, 2]")),
        ({"weights": torch.zeros(20, 3, dtype=torch.int64)}, ("weights", "float64", "Long")),
        ({"weights": torch.zeros(20, 3, device="meta")}, ("weights", "cpu", "meta")),
        ({"plan.slots": torch.tensor([60])}, ("slots", "60")),
        ({"plan.slots": torch.zeros(2, 2, dtype=torch.int64)}, ("slots", "[R]", "[2, 2]")),
        ({"plan.slots": torch.zeros(2, dtype=torch.int32)}, ("slots", "int64", "Int")),
        ({"plan.slots": torch.zeros(2, dtype=torch.int64, device="meta")}, ("slots", "cpu", "meta")),
        ({"plan.rows": torch.full((60,), 60)}, ("rows", "60")),
        ({"plan.rows": torch.full((60,), -2)}, ("rows", "60", "-2")),
        ({"plan.rows": torch.zeros(59, dtype=torch.int64)}, ("rows", "60", "59")),
        ({"plan.top_k": 0}, ("top_k", "0")),
        ({"plan.top_k": 2}, ("rows", "40", "60")),
    ],
    ids=short,
)
def test_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    arguments = {"x": torch.randn(20, 4), "plan": ops.ragged_plan(SKEWED.experts(), 8)}
    for name, value in changes.items():
        if name.startswith("plan."):
            arguments["plan"] = arguments["plan"]._replace(**{name.removeprefix("plan."): value})
        else:
            arguments[name] = value
    with refusal("ragged_sort", *named):
        ops.ragged_sort(**arguments)


def test_kernels_refuse_rows_of_nobody() -> None:
    """Plans on devices other than the CPU may have rows without a slot."""
    plan = ops.ragged_plan(SKEWED.experts(), 8)._replace(slots=torch.tensor([-1]))
    with refusal("ragged_sort", "slots", "60", "-1"):
        ops.ragged_sort(torch.randn(20, 4), plan)
