"""Routing: the experts of each token (route), and the slot of each row and the row of each slot (ragged_plan)."""

from itertools import product
from typing import Any, get_args

import pytest
import torch

from maxmoe import ops, reference
from maxmoe.config import Normalization, ScoreFunction
from maxmoe.config.components import GroupScore
from support.named import named
from support.operator_calls import Call, assert_same, expected_result, refusal, result, tolerance
from support.operator_checks import OperatorTests, check_compile, check_registrations, compile_whole
from support.pairwise import pairwise
from support.paths import emulated
from support.shapes import SKEWED, UNROUTED, Shape, each_dtype, each_shape

each_score_function = pytest.mark.parametrize("score_function", get_args(ScoreFunction))
NEVER = float("-inf")

# route


def route_call(num_tokens: int, num_experts: int, top_k: int, **options: Any) -> Call:
    logits = 2 * torch.randn(num_tokens, num_experts, dtype=torch.float64)
    return Call("route", {"logits": logits, "top_k": top_k, **options})


ALL_OPTIONS: dict[str, Any] = {
    "score_function": "sigmoid",
    "correction_bias": torch.randn(12, dtype=torch.float64),
    "num_groups": 4,
    "top_k_groups": 2,
    "scale": 2.5,
}


class TestRoute(OperatorTests):
    """The experts of the largest score + correction_bias, and weights made of their scores."""

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def call(self, shape: Shape) -> Call:
        # The gradient is zero for normalised weights with equal upstream gradients, and for K = 1.
        return route_call(shape.num_tokens, shape.num_experts, shape.top_k, normalization="none")


@each_score_function
def test_every_combination(every_path: str, score_function: ScoreFunction) -> None:
    """Given experts get weights like selected ones; a slot of -1 has weight 0 and affects no other weight."""
    groups = [(1, 1), (4, 2), (4, 4), (12, 5)]
    options = [get_args(Normalization), get_args(GroupScore), groups, (False, True), (False, True)]
    for normalization, group_score, (num_groups, top_k_groups), with_bias, is_given in pairwise(options):
        ids = torch.stack([torch.randperm(12)[:4] for _ in range(16)])
        ids[torch.rand(ids.shape) < 0.3] = -1
        ids[3] = -1
        call = route_call(
            16,
            12,
            4,
            score_function=score_function,
            correction_bias=torch.randn(12, dtype=torch.float64) if with_bias else None,
            num_groups=num_groups,
            top_k_groups=top_k_groups,
            group_score=group_score,
            normalization=normalization,
            scale=2.5,
            experts=ids if is_given else None,
        )
        got, single = result(call), call.cast(torch.float32)
        assert got.gradients.get("correction_bias") is None
        with named(normalization, group_score, num_groups, top_k_groups, f"bias {with_bias}, given {is_given}"):
            assert not is_given or torch.equal(got.outputs[1], ids)
            # Scores of "identity" may sum to almost nothing, which makes the weights and their error large.
            assert_same(got, result(call, reference), tolerance(torch.float64, 1))
            assert_same(result(single), expected_result(single), 20 * tolerance(torch.float32, 1))


@emulated
@each_dtype
def test_is_in_float32_or_wider(every_path: str, dtype: torch.dtype) -> None:
    """16 bit logits are converted to float32 exactly, and weights are computed without another rounding."""
    call = route_call(64, 16, 4, score_function="sigmoid").cast(dtype)
    (weights, experts, _), expected = call(), expected_result(call)
    assert weights.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(experts, expected.outputs[1])
    torch.testing.assert_close(weights.double(), expected.outputs[0], rtol=1e-6, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = call()
    assert torch.equal(under_autocast[0], weights)
    assert torch.equal(under_autocast[1], experts)


@each_score_function
def test_equal_logits_take_the_lowest_index(every_path: str, score_function: ScoreFunction) -> None:
    """Equal logits have equal scores in every lane of a vector and in the remainder."""
    for dtype, num_experts in product((torch.float64, torch.float32), (1, 2, 7, 8, 13, 64, 129, 256)):
        top_k = min(5, num_experts)
        for value in (0.0, 0.7, -3.1):
            logits = torch.full((3, num_experts), value, dtype=dtype)
            _, experts, _ = ops.route(logits, top_k, score_function=score_function, normalization="none")
            assert experts.tolist() == [list(range(top_k))] * 3, (dtype, num_experts, value)


@emulated
def test_ties_among_few_values(every_path: str) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        groups = {"normalization": "none", "num_groups": 6, "top_k_groups": 3}
        call = route_call(16, 24, 6, score_function="identity", **groups)
        call = call.replace(logits=torch.randint(0, 3, (16, 24)).double())
        assert torch.equal(call()[1], call(reference)[1])


def test_groups_hold_even_when_an_expert_in_them_is_impossible(every_path: str) -> None:
    logits = torch.tensor([[9.0, NEVER, 9.0, 1.0, 1.0, 1.0]])
    _, experts, _ = ops.route(logits, 3, score_function="identity", normalization="none", num_groups=2, top_k_groups=1)
    assert experts.tolist() == [[0, 2, 1]]
    bias = torch.tensor([0.0, NEVER, 0.0, 0.0, 0.0, 0.0])
    _, experts, _ = ops.route(
        logits.nan_to_num(neginf=0.0),
        3,
        score_function="identity",
        correction_bias=bias,
        num_groups=2,
        top_k_groups=1,
    )
    assert experts.tolist() == [[0, 2, 1]]


@emulated
def test_impossible_experts_are_not_chosen_and_get_no_gradient(every_path: str) -> None:
    logits = torch.tensor([[1.0, NEVER, 2.0, NEVER, 0.5]], requires_grad=True)
    weights, experts, _ = ops.route(logits, 3)
    assert experts.tolist() == [[2, 0, 4]]
    weights.backward(torch.randn(1, 3))
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, [1, 3]].tolist() == [0.0, 0.0]


@emulated
@each_score_function
def test_large_logits_stay_finite(every_path: str, score_function: ScoreFunction) -> None:
    logits = torch.tensor([[1e4, -600.0, 88.0, 0.0, 9.9e3]], dtype=torch.float32)
    call = Call("route", {"logits": logits, "top_k": 2, "score_function": score_function})
    got = result(call)
    assert got.outputs[0].isfinite().all()
    assert got.outputs[1].tolist()[0][0] == 0
    gradient, expected = got.gradients["logits"], expected_result(call)
    assert gradient is not None and expected.gradients["logits"] is not None
    torch.testing.assert_close(got.outputs[0].double(), expected.outputs[0])
    torch.testing.assert_close(gradient.double(), expected.gradients["logits"])
    lowest = result(call.replace(logits=torch.full((2, 5), -1e3)))
    assert all(
        value is not None and value.isfinite().all() for value in (lowest.outputs[2], lowest.gradients["logits"])
    )


@pytest.mark.parametrize("top_k", [1, 3])
def test_what_all_weights_have_in_common_leaves_no_rounding_error(every_path: str, top_k: int) -> None:
    """Weights that sum to one have no gradient along their sum: its rounding would be divided by small scores."""
    logits = torch.linspace(1e-4, 3e-4, 99 * top_k).view(99, top_k).requires_grad_()
    weights, _, _ = ops.route(logits, top_k, score_function="identity", normalization="sum")
    (gradient,) = torch.autograd.grad(weights, logits, torch.linspace(0.1, 20, 99).view(99, 1).expand(99, top_k))
    assert gradient.abs().max() <= 20 * 1e-20 / 1e-4**2


def test_gradient_at_scores_of_zero(every_path: str) -> None:
    """The sum has 1e-20 added, which is all of it here: weight = score / 1e-20."""
    logits = torch.zeros(2, 3, requires_grad=True)
    weights, _, _ = ops.route(logits, 2, score_function="identity", normalization="sum")
    (gradient,) = torch.autograd.grad(weights, logits, torch.tensor([[1.0, 2.0], [3.0, -4.0]]))
    torch.testing.assert_close(gradient, 1e20 * torch.tensor([[1.0, 2.0, 0.0], [3.0, -4.0, 0.0]]))


def test_compiles() -> None:
    """With all arguments, and for any number of tokens."""
    call = route_call(20, 12, 4, **ALL_OPTIONS)
    check_compile(call, "aot_eager")
    check_registrations(call)
    compiled = compile_whole(ops.route, "aot_eager", dynamic=True)
    for num_tokens in (5, 9, 32):
        logits = torch.randn(num_tokens, SKEWED.num_experts)
        for ours, expected in zip(compiled(logits, 3), ops.route(logits, 3), strict=True):
            assert torch.equal(ours, expected)


# ragged_plan


def assert_same_plan(got: Any, expected: Any) -> None:
    for name in ("slots", "rows", "group_sizes", "dropped"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert ours.dtype == torch.int64
        assert torch.equal(ours, theirs), f"{name}: {ours.tolist()} is not {theirs.tolist()}"
    assert got.top_k == expected.top_k


@emulated
@each_shape
def test_plans_equal_the_reference(every_path: str, shape: Shape) -> None:
    for first, count, max_rows in product((0, 1, shape.num_experts), (None, 1, 2), (None, 0, 1, 7, 10**6)):
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


@emulated
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


@emulated
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


def test_strides_of_experts_do_not_matter(every_path: str) -> None:
    experts = SKEWED.experts()
    assert_same_plan(ops.ragged_plan(experts.T.contiguous().T, 8), ops.ragged_plan(experts.contiguous(), 8))
    assert_same_plan(ops.ragged_plan(experts[:, ::2], 8), ops.ragged_plan(experts[:, ::2].contiguous(), 8))


def test_opcheck_of_plans() -> None:
    torch.library.opcheck(torch.ops.maxmoe.ragged_plan.default, (UNROUTED.experts(), 4))
    torch.library.opcheck(torch.ops.maxmoe.ragged_plan.default, (UNROUTED.experts(), 4), {"max_rows": 3})


@pytest.mark.parametrize("share", [(0, None), (30000, 10000)], ids=str)
def test_more_experts_than_int16_holds(path: str, share: tuple[int, int | None]) -> None:
    experts = torch.tensor([[39999, 0], [32768, -1], [30000, 39999], [32767, 29999]])
    options: dict[str, Any] = {"first_expert": share[0], "num_local_experts": share[1]}
    assert_same_plan(ops.ragged_plan(experts, 40000, **options), reference.ragged_plan(experts, 40000, **options))
