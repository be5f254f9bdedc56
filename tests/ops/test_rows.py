"""Rows that are gathered, summed, scattered, multiplied pairwise, sorted by expert and combined."""

import pytest
import torch
from torch import Tensor

from maxmoe import ops, reference
from support.memory import saved_for_backward
from support.operator_calls import Call, assert_same, refusal, result
from support.operator_checks import MixedWeights, OperatorTests, UnreadElements
from support.paths import emulated
from support.shapes import SKEWED, Shape

NAN = float("nan")


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def read(index: Tensor, count: int) -> Tensor:
    """Whether each of a number of rows is in an index."""
    return torch.isin(torch.arange(count), index)


class TestRaggedGather(MixedWeights, UnreadElements, OperatorTests):
    """out[i] = weights[i] * x[index[i]] for i in [start, end) where index[i] >= 0, else 0."""

    optional = ("weights", "start", "end")

    def call(self, shape: Shape) -> Call:
        """Every slot with an expert gathers a token; the first and the last slot are outside of [start, end)."""
        experts = shape.experts().flatten()
        tokens = torch.arange(len(experts)) * 7 % max(shape.num_tokens, 1)
        return Call(
            "ragged_gather",
            {
                "x": random(shape.num_tokens, shape.hidden_size),
                "index": torch.where(experts >= 0, tokens, -1),
                "weights": random(len(experts)),
                "start": min(1, len(experts)),
                "end": max(len(experts) - 1, min(1, len(experts))),
            },
        )

    def unread(self, call: Call) -> dict[str, Tensor]:
        index = call.arguments["index"].clone()
        index[[0, -1]] = -1
        return {"x": ~read(index, len(call.arguments["x"])), "weights": index < 0, "out": index < 0}


class TestRaggedGatherReduce(MixedWeights, UnreadElements, OperatorTests):
    """out[t] = sum of weights[j] * rows[index[j]] over the valid j of group t."""

    optional = ("weights", "valid")

    def call(self, shape: Shape) -> Call:
        """The rows of a plan go back to their tokens; every seventh slot is not valid."""
        plan = reference.ragged_plan(shape.experts(), shape.num_experts)
        return Call(
            "ragged_gather_reduce",
            {
                "rows": random(len(plan.slots), shape.hidden_size),
                "index": plan.rows,
                "group_size": shape.top_k,
                "weights": random(len(plan.rows)),
                "valid": torch.arange(len(plan.rows)) % 7 != 6,
            },
        )

    def unread(self, call: Call) -> dict[str, Tensor]:
        index = torch.where(call.arguments["valid"], call.arguments["index"], -1)
        is_idle = (index < 0).view(-1, call.arguments["group_size"]).all(1)
        return {"rows": ~read(index, len(call.arguments["rows"])), "weights": index < 0, "out": is_idle}


class TestRaggedScatterAdd(MixedWeights, UnreadElements, OperatorTests):
    """out[n] = sum of weights[j] * rows[j // group_size] over the j where index[j] == n."""

    optional = ("weights",)

    def call(self, shape: Shape) -> Call:
        """Every token is added to its K experts, some of which get many rows; the last row of the result gets none."""
        index = shape.experts().flatten()
        return Call(
            "ragged_scatter_add",
            {
                "rows": random(shape.num_tokens, shape.hidden_size),
                "index": index,
                "num_rows": shape.num_experts + 1,
                "group_size": shape.top_k,
                "weights": random(len(index)),
            },
        )

    def unread(self, call: Call) -> dict[str, Tensor]:
        index, num_rows = call.arguments["index"], call.arguments["num_rows"]
        is_idle = (index < 0).view(-1, call.arguments["group_size"]).all(1)
        return {"rows": is_idle, "weights": index < 0, "out": ~read(index, num_rows)}


class TestRaggedDot(UnreadElements, OperatorTests):
    """out[j] = <a[j // group_size], b[index[j]]>, 0 where index[j] < 0."""

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The gradient of weights, which may be float32 beside 16 bit rows."""
        return torch.promote_types(dtype, torch.float32)

    def call(self, shape: Shape) -> Call:
        """Every token with one vector of each of its K experts; the last vector belongs to none."""
        arguments = {"a": random(shape.num_tokens, shape.hidden_size)}
        arguments |= {"b": random(shape.num_experts + 1, shape.hidden_size), "index": shape.experts().flatten()}
        return Call("ragged_dot", {**arguments, "group_size": shape.top_k})

    def unread(self, call: Call) -> dict[str, Tensor]:
        index = call.arguments["index"]
        is_idle = (index < 0).view(-1, call.arguments["group_size"]).all(1)
        return {"a": is_idle, "b": ~read(index, len(call.arguments["b"])), "out": index < 0}


class TestRaggedSort(MixedWeights, UnreadElements, OperatorTests):
    """rows[r] = weights.flat[slots[r]] * x[slots[r] // K]."""

    optional = ("weights",)

    def call(self, shape: Shape) -> Call:
        arguments = {"x": random(shape.num_tokens, shape.hidden_size)}
        arguments |= {"plan": ops.ragged_plan(shape.experts(), shape.num_experts)}
        return Call("ragged_sort", {**arguments, "weights": random(shape.num_tokens, shape.top_k)})

    def unread(self, call: Call) -> dict[str, Tensor]:
        is_unrouted = (call.arguments["plan"].rows < 0).view_as(call.arguments["weights"])
        return {"x": is_unrouted.all(1), "weights": is_unrouted}


class TestRaggedUnsort(MixedWeights, UnreadElements, OperatorTests):
    """out[t] = sum over k of weights[t, k] * rows[plan.rows[t * K + k]]."""

    optional = ("weights",)

    def call(self, shape: Shape) -> Call:
        """The last three rows are past the plan."""
        plan = ops.ragged_plan(shape.experts(), shape.num_experts)
        arguments = {"rows": random(len(plan.slots) + 3, shape.hidden_size), "plan": plan}
        return Call("ragged_unsort", {**arguments, "weights": random(shape.num_tokens, shape.top_k)})

    def unread(self, call: Call) -> dict[str, Tensor]:
        rows, is_unrouted = call.arguments["rows"], (call.arguments["plan"].rows < 0).view_as(call.arguments["weights"])
        is_past = torch.arange(len(rows)) >= len(rows) - 3
        return {"rows": is_past, "weights": is_unrouted, "out": is_unrouted.all(1)}


def test_group_size_is_one_by_default() -> None:
    a, b = torch.randn(3, 4), torch.randn(2, 4)
    out = ops.ragged_dot(a, b, torch.tensor([1, -1, 0]))
    torch.testing.assert_close(out, torch.stack([a[0] @ b[1], torch.zeros(()), a[2] @ b[0]]))


# Plans that do not have every row


@pytest.mark.parametrize("max_rows", [0, 5, 20])
def test_of_a_share_of_the_experts_cut_at_max_rows(every_path: str, max_rows: int) -> None:
    plan = ops.ragged_plan(SKEWED.experts(), 8, first_expert=1, num_local_experts=4, max_rows=max_rows)
    sort = TestRaggedSort().call(SKEWED).replace(plan=plan)
    assert sort()[0].shape == (max_rows, SKEWED.hidden_size)
    unsort = TestRaggedUnsort().call(SKEWED).replace(plan=plan, rows=random(max_rows, SKEWED.hidden_size))
    for call in (sort, unsort):
        assert_same(result(call), result(call, reference), 1e-14)


def test_no_rows(every_path: str) -> None:
    """An index of -1 is valid for no rows; any other index is an error."""
    rows, nothing = torch.randn(3, 4), torch.empty(0, 4)
    assert ops.ragged_scatter_add(rows, torch.tensor([-1, -1, -1]), 0).shape == (0, 4)
    assert not ops.ragged_gather(nothing, torch.tensor([-1, -1])).any()
    assert not ops.ragged_gather(rows, torch.tensor([0, 1, 2]), start=3, end=3).any()
    with refusal("ragged_scatter_add", "index", "0"):
        ops.ragged_scatter_add(rows, torch.tensor([-1, 0, -1]), 0)
    with refusal("ragged_gather", "index", "0"):
        ops.ragged_gather(nothing, torch.tensor([-1, 0]))


# Precision


@emulated
def test_sums_in_float32(every_path: str) -> None:
    """256 + 1 + ... + 1 stays 256 when it is added up in bfloat16."""
    rows = torch.ones(257, 3, dtype=torch.bfloat16)
    rows[0] = 256
    assert ops.ragged_gather_reduce(rows, torch.arange(257), 257).tolist() == [[512.0] * 3]
    assert ops.ragged_scatter_add(rows, torch.zeros(257, dtype=torch.int64), 1).tolist() == [[512.0] * 3]


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_in_float32_are_not_rounded(every_path: str, dtype: torch.dtype) -> None:
    """The sum in float32 is rounded once, to the dtype of the rows. Rounded weights give an error of 0.28 eps."""
    rows, weights = torch.randn(1024, 32).to(dtype), torch.rand(1024)
    index = torch.randperm(1024)
    exact = (rows.double()[index] * weights.double().unsqueeze(1)).view(512, 2, 32).sum(1)
    error = ops.ragged_gather_reduce(rows, index, 2, weights) - exact
    assert error.norm() < 0.24 * torch.finfo(dtype).eps * exact.norm()
    gathered = ops.ragged_gather(torch.full((1, 4), 3.0).to(dtype), torch.tensor([0]), torch.tensor([1.0 + 2**-12]))
    assert gathered.tolist() == torch.full((1, 4), 3 * (1 + 2**-12)).to(dtype).tolist()


# What only some do


def test_unsort_saves_its_arguments_alone(every_path: str) -> None:
    call = TestRaggedUnsort().call(SKEWED).trainable()
    arguments = {tensor.data_ptr() for tensor in (*call.floats().values(), *call.arguments["plan"][:2])}
    with saved_for_backward() as saved:
        call()
    assert {tensor.data_ptr() for tensor in saved} == arguments


def test_kernels_refuse_rows_of_nobody() -> None:
    """Plans on devices other than the CPU may have rows without a slot."""
    plan = ops.ragged_plan(SKEWED.experts(), 8)
    with refusal("ragged_sort", "slots", "60", "-1"):
        ops.ragged_sort(torch.randn(20, 4), plan._replace(slots=torch.tensor([-1])))
    with refusal("ragged_unsort", "slots", "60", "-1"):
        ops.ragged_unsort(torch.randn(60, 4), plan._replace(slots=torch.full((60,), -1)))
