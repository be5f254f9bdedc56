"""ragged_unsort: out[t] = sum over k of weights[t, k] * rows[plan.rows[t * K + k]]."""

from typing import Any

import pytest
import torch

from maxmoe import ops, reference
from support.operator_calls import Call, assert_same, refusal, result, saved_for_backward, short
from support.operator_checks import MixedWeights, OperatorTests
from support.shapes import SKEWED, UNROUTED, Shape

NAN = float("nan")


def unsort_call(shape: Shape) -> Call:
    plan = ops.ragged_plan(shape.experts(), shape.num_experts)
    return Call(
        "ragged_unsort",
        {
            "rows": torch.randn(len(plan.slots), shape.hidden_size, dtype=torch.float64),
            "plan": plan,
            "weights": torch.randn(shape.num_tokens, shape.top_k, dtype=torch.float64),
        },
    )


class TestRaggedUnsort(MixedWeights, OperatorTests):
    def call(self, shape: Shape) -> Call:
        return unsort_call(shape)


def test_without_weights(every_path: str) -> None:
    call = unsort_call(SKEWED)
    ones = torch.ones_like(call.arguments["weights"])
    assert torch.equal(call.replace(weights=None)()[0], call.replace(weights=ones)()[0])
    assert_same(result(call.replace(weights=None)), result(call.replace(weights=None), reference), 1e-14)


@pytest.mark.parametrize("max_rows", [0, 5, 20])
def test_of_a_share_of_the_experts_cut_at_max_rows(every_path: str, max_rows: int) -> None:
    plan = ops.ragged_plan(SKEWED.experts(), 8, first_expert=1, num_local_experts=4, max_rows=max_rows)
    call = unsort_call(SKEWED).replace(plan=plan, rows=torch.randn(max_rows, SKEWED.hidden_size, dtype=torch.float64))
    assert_same(result(call), result(call, reference), 1e-14)


def test_nan_of_nobody_stays_out(every_path: str) -> None:
    """NaN in rows past the plan, in weights of slots without a row, in gradients of idle tokens."""
    call = unsort_call(UNROUTED)
    experts = UNROUTED.experts()
    rows, weights = call.arguments["rows"], call.arguments["weights"].clone()
    rows = torch.cat([rows, torch.full((3, rows.shape[1]), NAN, dtype=rows.dtype)])
    weights[experts < 0] = NAN
    cotangent = torch.randn(UNROUTED.num_tokens, UNROUTED.hidden_size, dtype=torch.float64)
    cotangent[(experts < 0).all(1)] = NAN
    assert weights.isnan().any() and cotangent.isnan().any()
    call = call.replace(rows=rows, weights=weights)
    got = result(call, ops, [cotangent])
    assert got.outputs[0].isfinite().all()
    for gradient in got.gradients.values():
        assert gradient is not None and gradient.isfinite().all()
    assert not got.gradients["rows"][-3:].any()  # type: ignore[index]
    assert_same(got, result(call, reference, [cotangent]), 1e-14)


def test_backward_fans_out_without_a_tensor_of_all_slots(every_path: str) -> None:
    """The backward saves nothing but the arguments."""
    call = unsort_call(SKEWED).trainable()
    arguments = {tensor.data_ptr() for tensor in (*call.floats().values(), *call.arguments["plan"][:2])}
    with saved_for_backward() as saved:
        call()
    assert {tensor.data_ptr() for tensor in saved} == arguments


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows": torch.randn(60)}, ("rows", "[R, D]", "[60]")),
        ({"rows": torch.randn(59, 4)}, ("rows", "59")),
        ({"rows": torch.zeros(60, 4, dtype=torch.int64)}, ("rows", "float64", "Long")),
        ({"weights": torch.zeros(20, 2)}, ("weights", "60", "[20, 2]")),
        ({"weights": torch.zeros(20, 3, dtype=torch.int64)}, ("weights", "float64", "Long")),
        ({"weights": torch.zeros(20, 3, device="meta")}, ("weights", "cpu", "meta")),
        ({"plan.slots": torch.full((60,), 60)}, ("slots", "60")),
        ({"plan.rows": torch.full((60,), 60)}, ("rows", "60")),
        ({"plan.rows": torch.full((60,), -2)}, ("rows", "60", "-2")),
        ({"plan.rows": torch.zeros(60, 1, dtype=torch.int64)}, ("rows", "[T * K]", "[60, 1]")),
        ({"plan.rows": torch.zeros(60, dtype=torch.int32)}, ("rows", "int64", "Int")),
        ({"plan.top_k": 0}, ("top_k", "0")),
        ({"plan.top_k": 7}, ("7", "60")),
    ],
    ids=short,
)
def test_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    arguments = {"rows": torch.randn(60, 4), "plan": ops.ragged_plan(SKEWED.experts(), 8)}
    for name, value in changes.items():
        if name.startswith("plan."):
            arguments["plan"] = arguments["plan"]._replace(**{name.removeprefix("plan."): value})
        else:
            arguments[name] = value
    with refusal("ragged_unsort", *named):
        ops.ragged_unsort(**arguments)


def test_kernels_refuse_rows_of_nobody() -> None:
    """Plans on devices other than the CPU may have rows without a slot."""
    plan = ops.ragged_plan(SKEWED.experts(), 8)._replace(slots=torch.full((60,), -1))
    with refusal("ragged_unsort", "slots", "60", "-1"):
        ops.ragged_unsort(torch.randn(60, 4), plan)
