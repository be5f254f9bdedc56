"""route: the experts of the largest score + correction_bias, and weights made of their scores."""

from itertools import product
from typing import Any, get_args

import pytest
import torch

from maxmoe import ops, reference
from maxmoe.config import Normalization, ScoreFunction
from maxmoe.config.components import GroupScore
from support.named import named
from support.operator_calls import Call, assert_same, expected_result, refusal, result, short, tolerance
from support.operator_checks import (
    OperatorTests,
    check_compile,
    check_registrations,
    compile_whole,
)
from support.pairwise import pairwise
from support.shapes import SKEWED, Shape, each_dtype

each_score_function = pytest.mark.parametrize("score_function", get_args(ScoreFunction))
each_normalization = pytest.mark.parametrize("normalization", get_args(Normalization))
NEVER = float("-inf")


def route_call(num_tokens: int, num_experts: int, top_k: int, **options: Any) -> Call:
    logits = 2 * torch.randn(num_tokens, num_experts, dtype=torch.float64)
    return Call("route", {"logits": logits, "top_k": top_k, **options})


class TestRoute(OperatorTests):
    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def call(self, shape: Shape) -> Call:
        # The gradient is zero for normalised weights with equal upstream gradients, and for K = 1.
        return route_call(shape.num_tokens, shape.num_experts, shape.top_k, normalization="none")


@pytest.mark.sampled(12)
@each_score_function
@each_normalization
def test_every_combination(path: str, normalization: Normalization, score_function: ScoreFunction) -> None:
    groups = [(1, 1), (4, 2), (4, 4), (12, 5)]
    for group_score, (num_groups, top_k_groups), with_bias in pairwise([get_args(GroupScore), groups, (False, True)]):
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
        )
        got, single = result(call), call.cast(torch.float32)
        assert got.gradients.get("correction_bias") is None
        with named(group_score, num_groups, top_k_groups, f"bias {with_bias}"):
            # Scores of "identity" may sum to almost nothing, which makes the weights and their error large.
            assert_same(got, result(call, reference), tolerance(torch.float64, 1))
            assert_same(result(single), expected_result(single), 20 * tolerance(torch.float32, 1))


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


def test_ties_among_few_values(every_path: str) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        call = Call(
            "route",
            {
                "logits": torch.randint(0, 3, (16, 24)).double(),
                "top_k": 6,
                "score_function": "identity",
                "normalization": "none",
                "num_groups": 6,
                "top_k_groups": 3,
            },
        )
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


def test_impossible_experts_are_not_chosen_and_get_no_gradient(every_path: str) -> None:
    logits = torch.tensor([[1.0, NEVER, 2.0, NEVER, 0.5]], requires_grad=True)
    weights, experts, _ = ops.route(logits, 3)
    assert experts.tolist() == [[2, 0, 4]]
    weights.backward(torch.randn(1, 3))
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, [1, 3]].tolist() == [0.0, 0.0]


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


def test_correction_bias_gets_no_gradient(every_path: str) -> None:
    logits, bias = torch.randn(4, 6, requires_grad=True), torch.zeros(6, requires_grad=True)
    weights, _, _ = ops.route(logits, 2, score_function="sigmoid", correction_bias=bias)
    assert torch.autograd.grad(weights.sum(), [logits, bias], allow_unused=True)[1] is None


def test_unused_weights_cost_nothing(every_path: str) -> None:
    """The experts are integers, which have no gradient."""
    _, experts, _ = ops.route(torch.randn(4, 6, requires_grad=True), 2)
    assert experts.dtype == torch.int64
    assert not experts.requires_grad


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_with_all_arguments(path: str, backend: str) -> None:
    call = route_call(
        20,
        12,
        4,
        score_function="sigmoid",
        correction_bias=torch.randn(12, dtype=torch.float64),
        num_groups=4,
        top_k_groups=2,
        scale=2.5,
    )
    check_compile(call, backend)
    check_registrations(call)


@pytest.mark.sampled(1)
def test_compiles_for_any_number_of_tokens(path: str) -> None:
    compiled = compile_whole(ops.route, "aot_eager", dynamic=True)
    for num_tokens in (5, 9, 32):
        logits = torch.randn(num_tokens, SKEWED.num_experts)
        for ours, expected in zip(compiled(logits, 3), ops.route(logits, 3), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logits": torch.randn(6)}, ("logits", "[T, E]", "[6]")),
        ({"logits": torch.zeros(4, 6, dtype=torch.int64)}, ("logits", "float64", "Long")),
        ({"top_k": 0}, ("top_k", "1", "0")),
        ({"top_k": 7}, ("top_k", "num_experts", "6", "7")),
        ({"score_function": "tanh"}, ("score_function", "sqrtsoftplus", "tanh")),
        ({"group_score": "mean"}, ("group_score", "top2", "mean")),
        ({"normalization": "l2"}, ("normalization", "softmax", "l2")),
        ({"num_groups": 4}, ("num_groups", "num_experts", "6", "4")),
        ({"num_groups": 0}, ("num_groups", "0")),
        ({"num_groups": -3}, ("num_groups", "-3")),
        ({"num_groups": 2, "top_k_groups": 3}, ("top_k_groups", "2", "3")),
        ({"top_k_groups": 0}, ("top_k_groups", "0")),
        ({"num_groups": 3, "top_k": 3}, ("top_k", "2", "top_k_groups", "1", "3")),
        ({"correction_bias": torch.zeros(5)}, ("correction_bias", "6", "[5]")),
        ({"correction_bias": torch.zeros(1, 6)}, ("correction_bias", "[E]", "[1, 6]")),
        ({"correction_bias": torch.zeros(6, dtype=torch.int64)}, ("correction_bias", "float64", "Long")),
        ({"correction_bias": torch.zeros(6, device="meta")}, ("correction_bias", "cpu", "meta")),
        ({"correction_bias": torch.tensor([0.0] * 5 + [float("nan")])}, ("correction_bias must be numbers, got NaN",)),
        ({"logits": torch.tensor([[0.0] * 6, [0.0] * 5 + [float("nan")]])}, ("logits", "NaN", "1", "2")),
        ({"logits": torch.full((1, 6), NEVER)}, ("logits", "NaN")),
        ({"logits": torch.tensor([[float("inf")] + [0.0] * 5])}, ("logits", "NaN")),
    ],
    ids=short,
)
def test_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    with refusal("route", *named):
        ops.route(**{"logits": torch.randn(4, 6), "top_k": 2, **changes})


@each_score_function
@each_normalization
def test_given_experts(every_path: str, normalization: Normalization, score_function: ScoreFunction) -> None:
    """Given experts get weights like selected ones; a slot of -1 has weight 0 and affects no other weight."""
    ids = torch.stack([torch.randperm(12)[:4] for _ in range(16)])
    ids[torch.rand(ids.shape) < 0.3] = -1
    ids[3] = -1
    call = route_call(16, 12, 4, score_function=score_function, normalization=normalization, scale=2.5, experts=ids)
    got = result(call)
    assert torch.equal(got.outputs[1], ids) and torch.equal(
        got.outputs[0][ids < 0], got.outputs[0].new_zeros((ids < 0).sum())
    )
    assert_same(got, result(call, reference), tolerance(torch.float64, 1))


@each_score_function
@each_normalization
def test_the_selected_experts_given_again_have_the_same_bits(
    every_path: str, normalization: Normalization, score_function: ScoreFunction
) -> None:
    logits = torch.randn(33, 17)
    selected = ops.route(logits, 5, score_function=score_function, normalization=normalization)
    again = ops.route(logits, 5, score_function=score_function, normalization=normalization, experts=selected[1])
    assert all(torch.equal(one, other) for one, other in zip(selected, again, strict=True))


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
