"""ragged_plan: the slot of each row, and the row of each slot."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import ops, reference
from support.named import named
from support.operator_calls import refusal, short
from support.operator_checks import compile_whole
from support.sampling import by_default
from support.shapes import MANY_ROWS, SKEWED, UNROUTED, Shape, each_shape


def assert_same_plan(got: Any, expected: Any) -> None:
    for name in ("slots", "rows", "group_sizes", "dropped"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert ours.dtype == torch.int64
        assert torch.equal(ours, theirs), f"{name}: {ours.tolist()} is not {theirs.tolist()}"
    assert got.top_k == expected.top_k


@each_shape
def test_equals_reference(every_path: str, shape: Shape) -> None:
    for first, count, max_rows in product((0, 1), (None, 1, 2), (None, 0, 1, 7, 10**6)):
        first_expert = min(first, shape.num_experts)
        arguments: dict[str, Any] = {
            "first_expert": first_expert,
            "num_local_experts": count and min(count, shape.num_experts - first_expert),
            "max_rows": max_rows,
        }
        got = ops.ragged_plan(shape.experts(), shape.num_experts, **arguments)
        expected = reference.ragged_plan(shape.experts(), shape.num_experts, **arguments)
        if every_path != "cpu" and max_rows is not None:  # the bound is the number of rows
            of_nobody = min(max_rows, shape.experts().numel()) - len(expected.slots)
            expected = expected._replace(slots=torch.nn.functional.pad(expected.slots, (0, of_nobody), value=-1))
        with named(arguments):
            assert_same_plan(got, expected)


def test_the_number_of_rows_that_the_caller_knows(every_path: str) -> None:
    """num_rows must be exact on the CPU; other devices accept more rows; fewer rows are an error everywhere."""
    experts = UNROUTED.experts()
    exact = ops.ragged_plan(experts, 4)
    num_rows = len(exact.slots)
    assert_same_plan(ops.ragged_plan(experts, 4, num_rows=num_rows), exact)
    with refusal("ragged_plan", "num_rows", str(num_rows), str(num_rows - 1)):
        ops.ragged_plan(experts, 4, num_rows=num_rows - 1)
    if every_path == "cpu":
        with refusal("ragged_plan", "num_rows", str(num_rows), str(num_rows + 30)):
            ops.ragged_plan(experts, 4, num_rows=num_rows + 30)
        return
    more = ops.ragged_plan(experts, 4, num_rows=num_rows + 30)
    assert more.slots.tolist() == [*exact.slots.tolist(), *[-1] * 30]
    assert_same_plan(more._replace(slots=exact.slots), exact)


def test_no_local_experts(every_path: str) -> None:
    plan = ops.ragged_plan(SKEWED.experts(), SKEWED.num_experts, first_expert=SKEWED.num_experts)
    assert_same_plan(plan, reference.ragged_plan(SKEWED.experts(), SKEWED.num_experts, first_expert=SKEWED.num_experts))
    assert plan.slots.numel() == 0
    assert (plan.rows == -1).all()


def test_shares_of_the_experts_partition_the_rows(every_path: str) -> None:
    experts = SKEWED.experts()
    whole = ops.ragged_plan(experts, 8)
    shares = [ops.ragged_plan(experts, 8, first_expert=first, num_local_experts=2) for first in range(0, 8, 2)]
    assert torch.equal(torch.cat([share.slots for share in shares]), whole.slots)
    assert torch.equal(torch.cat([share.group_sizes for share in shares]), whole.group_sizes)


def test_is_a_stable_sort(every_path: str) -> None:
    """More slots than the blocks that are counted in parallel."""
    experts = torch.randint(-1, 61, (20011, 5))
    plan = ops.ragged_plan(experts, 61)
    flat = experts.flatten()
    order = flat.argsort(stable=True)[(flat == -1).sum() :]
    assert torch.equal(plan.slots, order)
    assert torch.equal(plan.rows[order], torch.arange(len(order)))
    assert (plan.rows[flat == -1] == -1).all()
    assert torch.equal(plan.group_sizes, flat[flat >= 0].bincount(minlength=61))
    cut = ops.ragged_plan(experts, 61, max_rows=12345)
    assert torch.equal(cut.slots, order[:12345])
    assert cut.dropped.item() == len(order) - 12345
    assert cut.group_sizes.sum() == 12345


def test_same_for_any_number_of_threads(path: str) -> None:
    experts = MANY_ROWS.experts()
    first = ops.ragged_plan(experts, MANY_ROWS.num_experts)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert_same_plan(ops.ragged_plan(experts, MANY_ROWS.num_experts), first)


def test_strides_do_not_matter(every_path: str) -> None:
    experts = SKEWED.experts()
    assert_same_plan(ops.ragged_plan(experts.T.contiguous().T, 8), ops.ragged_plan(experts.contiguous(), 8))
    assert_same_plan(ops.ragged_plan(experts[:, ::2], 8), ops.ragged_plan(experts[:, ::2].contiguous(), 8))


@pytest.mark.sampled(1)
def test_opcheck(path: str) -> None:
    torch.library.opcheck(torch.ops.maxmoe.ragged_plan.default, (UNROUTED.experts(), 4))
    torch.library.opcheck(torch.ops.maxmoe.ragged_plan.default, (UNROUTED.experts(), 4), {"max_rows": 3})


@pytest.mark.parametrize("backend", by_default(["aot_eager", "inductor"], ["inductor"]))
def test_compiles_with_all_that_follows(path: str, backend: str) -> None:
    """The number of rows depends on the data: compiled code must not need it at compile time."""

    def sort_and_unsort(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        plan = ops.ragged_plan(experts, 4)
        return ops.ragged_unsort(ops.ragged_sort(x, plan).relu(), plan, weights)

    compiled = compile_whole(sort_and_unsort, backend)
    for shape in (UNROUTED, UNROUTED, Shape("more", 17, 4, 2, 8, 4, lambda slot: slot % 4)):
        leaves = [
            torch.randn(shape.num_tokens, shape.hidden_size, requires_grad=True),
            torch.rand(shape.num_tokens, shape.top_k, requires_grad=True),
        ]
        eager, fast = (f(*leaves, shape.experts()) for f in (sort_and_unsort, compiled))
        torch.testing.assert_close(fast, eager)
        cotangent = torch.randn_like(eager)
        for ours, expected in zip(
            torch.autograd.grad(fast, leaves, cotangent),
            torch.autograd.grad(eager, leaves, cotangent),
            strict=True,
        ):
            torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"experts": torch.zeros(6, dtype=torch.int64)}, ("experts", "[T, K]", "[6]")),
        ({"experts": torch.zeros(3, 2)}, ("experts", "int64", "Float")),
        ({"experts": torch.zeros(3, 2, dtype=torch.int32)}, ("experts", "int64", "Int")),
        ({"experts": torch.tensor([[0, 5]])}, ("experts", "-1", "5", "5")),
        ({"experts": torch.tensor([[0, -2]])}, ("experts", "-1", "5", "-2")),
        ({"num_experts": 0}, ("num_experts", "1", "0")),
        ({"num_experts": -4}, ("num_experts", "1", "-4")),
        ({"first_expert": -1}, ("first_expert", "5", "-1")),
        ({"first_expert": 6}, ("first_expert", "5", "6")),
        ({"num_local_experts": -1}, ("num_local_experts", "5", "-1")),
        ({"num_local_experts": 6}, ("num_local_experts", "5", "6")),
        ({"first_expert": 3, "num_local_experts": 3}, ("num_local_experts", "2", "3")),
        ({"max_rows": -1}, ("max_rows", "-1")),
    ],
    ids=short,
)
def test_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    arguments: dict[str, Any] = {"experts": torch.zeros(3, 2, dtype=torch.int64), "num_experts": 5}
    with refusal("ragged_plan", *named):
        ops.ragged_plan(**{**arguments, **changes})


@pytest.mark.parametrize("share", [(0, None), (30000, 10000)], ids=str)
def test_more_experts_than_int16_holds(path: str, share: tuple[int, int | None]) -> None:
    experts = torch.tensor([[39999, 0], [32768, -1], [30000, 39999], [32767, 29999]])
    options: dict[str, Any] = {"first_expert": share[0], "num_local_experts": share[1]}
    assert_same_plan(ops.ragged_plan(experts, 40000, **options), reference.ragged_plan(experts, 40000, **options))
