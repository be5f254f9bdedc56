"""Low-rank factors beside the matrices of expert_ffn and gmm; test_expert_ffn.py has them beside its other options."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from maxmoe import ops, reference
from support.matrix_calls import PROJECTIONS, RANKS, factored_gmm_call, ffn_call, with_factors
from support.named import named
from support.operator_calls import Call, assert_same, expected_result, result, strided, tolerance
from support.operator_checks import AutogradTests, ExecutedOperators
from support.shapes import EMPTY_EXPERTS, ODD_WIDTHS, SEVERAL_BLOCKS, SHAPES, SKEWED, UNROUTED, Shape, scattered


class TestExpertFfn(AutogradTests):
    roundings = 8
    shared_in_backward = frozenset({"expert_ffn_backward"})

    def call(self, shape: Shape) -> Call:
        return with_factors(ffn_call(shape, bias=False))


class TestGmm(AutogradTests):
    roundings = 3
    shared_in_backward = frozenset({"gmm"})  # the gradients of lhs and of a share a product

    def call(self, shape: Shape) -> Call:
        return factored_gmm_call(shape)


BOTH: list[Callable[[Shape], Call]] = [TestExpertFfn().call, TestGmm().call]
each_operator = pytest.mark.parametrize("build", BOTH, ids=["expert_ffn", "gmm"])


@each_operator
def test_every_shape(path: str, build: Callable[[Shape], Call]) -> None:
    for shape in SHAPES:
        call = build(shape)
        with named(shape):
            assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ranks(path: str, dtype: torch.dtype) -> None:
    for rank, shape in (
        (1, ODD_WIDTHS),
        (7, SEVERAL_BLOCKS),
        (16, ODD_WIDTHS),
        (16, SEVERAL_BLOCKS),
        (33, SEVERAL_BLOCKS),
    ):
        for call in (with_factors(ffn_call(shape), dict.fromkeys(PROJECTIONS, rank)), factored_gmm_call(shape, rank)):
            call = call.cast(dtype)
            with named(call.operator, rank, shape):
                assert_same(result(call), expected_result(call), tolerance(dtype, 8))


@each_operator
@pytest.mark.parametrize("layout", ["transposed", "columns"])
def test_strides_do_not_matter(path: str, build: Callable[[Shape], Call], layout: str) -> None:
    """Also with D = F, D = 2F, top_k 1 or one expert, where a factor in the wrong place would have a valid shape."""
    shapes = [Shape("D = F, K = 1", 9, 3, 1, 6, 6, scattered(3)), Shape("D = 2F", 11, 4, 2, 10, 5, scattered(4))]
    for shape in (*shapes, Shape("one expert", 8, 1, 1, 4, 4, lambda slot: 0), EMPTY_EXPERTS, UNROUTED):
        call = build(shape)
        calls = [call] if call.operator == "gmm" else [call, ffn_call(shape, fused_gate="concatenated", ranks=RANKS)]
        for call in calls:
            other = call.replace(
                **{name: strided(v, layout) for name, v in call.tensors().items() if "_factors" in name}
            )
            with named(shape):
                assert_same(result(other), result(call, reference), tolerance(torch.float64, 1))


@pytest.mark.parametrize("operator", ["expert_ffn", "gmm"])
def test_factors_without_columns(path: str, operator: str) -> None:
    call = factored_gmm_call(SKEWED, 0)
    if operator == "expert_ffn":
        call = with_factors(ffn_call(SKEWED))
        factors = {name: value for name, value in call.tensors().items() if "factors" in name}
        call = call.replace(**{n: v[..., :0] if n.endswith("a") else v[:, :0] for n, v in factors.items()})
    got = result(call)
    plain = Call(call.operator, {name: value for name, value in call.arguments.items() if "factors" not in name})
    expected = result(plain)
    assert torch.equal(got.outputs[0], expected.outputs[0])
    assert all(torch.equal(got.gradients[name], gradient) for name, gradient in expected.gradients.items())


@each_operator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wider_factors_beside_16_bit_matrices(path: str, dtype: torch.dtype, build: Callable[[Shape], Call]) -> None:
    call = build(ODD_WIDTHS)
    wide = {name: value.float() for name, value in call.tensors().items() if "factors" in name}
    call = call.cast(dtype).replace(**wide)
    got = result(call)
    assert all(got.gradients[name].dtype == torch.float32 for name in wide)
    assert_same(got, expected_result(call), tolerance(dtype, 8))


@each_operator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(path: str, dtype: torch.dtype, build: Callable[[Shape], Call]) -> None:
    """As with x, parameters and factors in the dtype of autocast; gradients have the dtypes of the arguments."""
    call = build(SKEWED).cast(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        got = result(call)
    assert got.outputs[0].dtype == dtype
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in got.gradients.values())
    weights = {name: value for name, value in call.arguments.items() if name == "weights"}
    assert_same(got, result(call.cast(dtype).replace(**weights)), tolerance(dtype, 1))


def test_adapters_side_by_side(path: str) -> None:
    """Several adapters are one adapter with the columns of all of them."""
    call = ffn_call(SKEWED)
    first, second = (with_factors(call, {"up": rank}, scale).arguments for rank, scale in ((2, 0.5), (3, 1.75)))
    adapters = [
        ops.LowRankFactors(*(a[f"up_factors.{field}"] for field in ("a", "b", "scale"))) for a in (first, second)
    ]
    arguments = call.with_projections()
    up = arguments["up"]._replace(factors=ops.LowRankFactors.side_by_side(adapters))
    got = ops.expert_ffn(**{**arguments, "up": up})
    merged = call.arguments["up"] + sum(scale * a @ b for a, b, scale in adapters)
    torch.testing.assert_close(got, call.replace(up=merged)()[0], rtol=1e-12, atol=1e-12)


def test_gmm_multiplies_no_groups_for_a_frozen_matrix(path: str) -> None:
    call = factored_gmm_call(SKEWED).trainable()
    call.arguments["rhs"].requires_grad_(False)
    out = call()[0]
    with ExecutedOperators() as executed:
        out.sum().backward()
    sizes = {
        tuple(arguments[name].shape[1] for name in ("lhs", "rhs")) for op, arguments in executed.calls if op == "tgmm"
    }
    full = (call.arguments["lhs"].shape[1], call.arguments["rhs"].shape[2])
    assert sizes and full not in sizes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"a": torch.ones(2, 3)}, ValueError, r"factors.a must be floating, of shape \(L, in, r\), got .*\(2, 3\)"),
        ({"b": None}, ValueError, r"factors.b must be floating, of shape \(L, r, out\), got None"),
        ({"b": torch.ones(2, 3, 4).long()}, ValueError, r"factors.b must be floating, .* got torch.int64"),
        ({"a": torch.ones(2, 3, 4).cfloat()}, ValueError, r"factors.a must be floating, .* got torch.complex64"),  # type: ignore[attr-defined]
        ({"scale": "2"}, TypeError, "factors.scale must be a number, got str"),
    ],
)
def test_what_are_no_factors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call = factored_gmm_call(SKEWED).replace(**{f"rhs_factors.{name}": value for name, value in changes.items()})
    with pytest.raises(error, match=message):
        call()


def test_a_tuple_is_no_factors() -> None:
    a, b = torch.ones(3, 4, 2), torch.ones(3, 2, 5)
    with pytest.raises(TypeError, match=r"factors must be maxmoe.ops.LowRankFactors, got tuple"):
        ops.gmm(torch.ones(2, 4), ops.Projection(torch.ones(3, 4, 5), factors=(a, b)), torch.tensor([1, 1, 0]))
    with pytest.raises(ValueError, match="factors must have at least one item"):
        ops.LowRankFactors.side_by_side([])
