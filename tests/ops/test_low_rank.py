"""Low-rank factors beside the matrices of expert_ffn and gmm."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from maxmoe import ops, reference
from support.activations import LIMITED_OUTPUT, SITU
from support.ffn_call import ffn_call, with_fused_gate
from support.low_rank_calls import PROJECTIONS, RANKS, gmm_call, with_factors
from support.operator_calls import (
    Call,
    assert_same,
    expected_result,
    result,
    saved_for_backward,
    strided,
    tolerance,
)
from support.operator_checks import ExecutedOperators, OperatorTests, check_compile
from support.shapes import ODD_WIDTHS, SEVERAL_BLOCKS, SHAPES, SKEWED, UNROUTED, Shape, scattered


@pytest.mark.sampled(12)
class TestExpertFfn(OperatorTests):
    roundings = 8
    shared_in_backward = frozenset({"expert_ffn_backward"})

    def call(self, shape: Shape) -> Call:
        return with_factors(ffn_call(shape, bias=False))  # test_variants has biases


@pytest.mark.sampled(12)
class TestGmm(OperatorTests):
    roundings = 3
    shared_in_backward = frozenset({"gmm"})  # the gradients of lhs and of a share a product

    def call(self, shape: Shape) -> Call:
        return gmm_call(shape)


VARIANTS = {
    "no bias": lambda shape: ffn_call(shape, bias=False, activation="gelu"),
    "no weights": lambda shape: ffn_call(shape, weights=None),
    "plain": lambda shape: ffn_call(shape, gated=False, activation="relu2"),
    "concatenated": lambda shape: with_fused_gate(ffn_call(shape, **SITU), "concatenated"),
    "interleaved": lambda shape: with_fused_gate(ffn_call(shape, activation="swigluoai", limit=0.75), "interleaved"),
    "recomputed": lambda shape: ffn_call(shape, recompute=True, **LIMITED_OUTPUT),
    "recomputed, plain": lambda shape: ffn_call(shape, gated=False, bias=False, recompute=True),
}
each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def without_recompute(call: Call) -> Call:
    return Call(call.operator, {name: value for name, value in call.arguments.items() if name != "recompute"})


@pytest.mark.parametrize(
    ("shape", "variant"),
    [(shape, [*VARIANTS][(number + shift) % len(VARIANTS)]) for number, shape in enumerate(SHAPES) for shift in (0, 3)],
    ids=str,
)
def test_variants(path: str, shape: Shape, variant: str) -> None:
    call = with_factors(VARIANTS[variant](shape), scale=1.75)
    assert_same(result(call), result(without_recompute(call), reference), tolerance(torch.float64, 1))


@pytest.mark.sampled(20)
@each_variant
@pytest.mark.parametrize("names", [("gate",), ("up",), ("down",), ("gate", "down")], ids=str)
def test_factors_beside_some_matrices(path: str, names: tuple[str, ...], variant: Any) -> None:
    call = with_factors(variant(SKEWED), dict.fromkeys(names, 5))
    assert_same(result(call), result(without_recompute(call), reference), tolerance(torch.float64, 1))


@pytest.mark.sampled(14)
@pytest.mark.parametrize("rank", [1, 7, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [ODD_WIDTHS, SEVERAL_BLOCKS], ids=str)
def test_ranks(path: str, shape: Shape, dtype: torch.dtype, rank: int) -> None:
    for call in (with_factors(ffn_call(shape), dict.fromkeys(PROJECTIONS, rank)), gmm_call(shape, rank)):
        call = call.cast(dtype)
        assert_same(result(call), expected_result(call), tolerance(dtype, 8))


@pytest.mark.parametrize(
    "shape",
    [
        Shape("D = F, K = 1", 9, 3, 1, 6, 6, scattered(3)),
        Shape("D = 2F", 11, 4, 2, 10, 5, scattered(4)),
        Shape("one expert", 8, 1, 1, 4, 4, lambda slot: 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["transposed", "columns"])
def test_matrices_of_equal_sizes(path: str, shape: Shape, layout: str) -> None:
    """With D = F, D = 2F, top_k 1 or one expert, a factor in the wrong place would have a valid shape."""
    for call in (with_factors(ffn_call(shape)), with_factors(with_fused_gate(ffn_call(shape), "concatenated"))):
        call = call.replace(**{name: strided(v, layout) for name, v in call.tensors().items() if "_factors" in name})
        assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


@pytest.mark.parametrize("operator", ["expert_ffn", "gmm"])
def test_factors_without_columns(path: str, operator: str) -> None:
    call = ffn_call(SKEWED) if operator == "expert_ffn" else gmm_call(SKEWED, 0)
    if operator == "expert_ffn":
        empty = {n: torch.empty(*s, dtype=torch.float64) for n, s in _empty_factors(call).items()}
        call = call.replace(**empty)
    got = result(call)
    plain = Call(call.operator, {name: value for name, value in call.arguments.items() if "factors" not in name})
    expected = result(plain)
    assert torch.equal(got.outputs[0], expected.outputs[0])
    assert all(torch.equal(got.gradients[name], gradient) for name, gradient in expected.gradients.items())


def _empty_factors(call: Call) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name in PROJECTIONS:
        count, inner, outer = call.arguments[name].shape
        shapes |= {f"{name}_factors.a": (count, inner, 0), f"{name}_factors.b": (count, 0, outer)}
    return shapes


@pytest.mark.parametrize("build", [lambda: with_factors(ffn_call(ODD_WIDTHS)), lambda: gmm_call(ODD_WIDTHS)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_wider_factors_beside_16_bit_matrices(path: str, dtype: torch.dtype, build: Any) -> None:
    call = build()
    wide = {name: value.float() for name, value in call.tensors().items() if "factors" in name}
    call = call.cast(dtype).replace(**wide)
    got = result(call)
    assert all(got.gradients[name].dtype == torch.float32 for name in wide)
    assert_same(got, expected_result(call), tolerance(dtype, 8))


@pytest.mark.parametrize("build", [lambda: with_factors(ffn_call(SKEWED)), lambda: gmm_call(SKEWED)])
def test_autocast(path: str, build: Any) -> None:
    call = build().cast(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = result(call)
    lower = call.cast(torch.bfloat16)
    if "weights" in call.arguments:
        lower = lower.replace(weights=call.arguments["weights"])
    assert got.outputs[0].dtype == torch.bfloat16
    assert torch.equal(got.outputs[0], result(lower).outputs[0])


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
    expected = call.replace(up=merged)()[0]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


# The cost of a frozen matrix


@pytest.mark.parametrize("recompute", [False, True])
def test_no_gradient_of_a_frozen_matrix(path: str, recompute: bool) -> None:
    call = with_factors(ffn_call(SKEWED, recompute=recompute)).trainable()
    for name in PROJECTIONS:
        call.arguments[name].requires_grad_(False)
    out = call()[0]
    with ExecutedOperators() as executed:
        out.sum().backward()
    ((_, arguments),) = [entry for entry in executed.calls if entry[0] == "expert_ffn_backward"]
    names = ("x", "weights", *(name + field for name in PROJECTIONS for field in ("", "_bias", "_a", "_b")))
    mask = dict(zip(names, arguments["output_mask"], strict=True))
    assert [mask[name] for name in PROJECTIONS] == [False] * 3
    assert sum(arguments["output_mask"]) == len(arguments["output_mask"]) - 3
    assert all(call.arguments[f"{name}_factors.{field}"].grad.any() for name in PROJECTIONS for field in "ab")


def test_gmm_multiplies_no_groups_for_a_frozen_matrix(path: str) -> None:
    call = gmm_call(SKEWED).trainable()
    call.arguments["rhs"].requires_grad_(False)
    out = call()[0]
    with ExecutedOperators() as executed:
        out.sum().backward()
    sizes = {
        tuple(arguments[name].shape[1] for name in ("lhs", "rhs")) for op, arguments in executed.calls if op == "tgmm"
    }
    full = (call.arguments["lhs"].shape[1], call.arguments["rhs"].shape[2])
    assert sizes and full not in sizes


@pytest.mark.parametrize("recompute", [False, True])
def test_saves_rows_of_r_columns_more(recompute: bool) -> None:
    plain = ffn_call(SKEWED, recompute=recompute)
    with saved_for_backward() as without:
        plain.trainable()()
    call = with_factors(plain)
    with saved_for_backward() as saved:
        call.trainable()()
    arguments = {tensor.data_ptr() for tensor in call.tensors().values()}
    own = [tensor for tensor in saved if tensor.data_ptr() not in arguments and tensor.numel()]
    extra = sum(map(Tensor.numel, own)) - sum(
        t.numel() for t in without if t.numel() and t.data_ptr() not in {v.data_ptr() for v in plain.tensors().values()}
    )
    num_rows = 0 if recompute else len(call.arguments["plan"].slots)
    assert extra == num_rows * sum(RANKS.values())


@pytest.mark.slow
def test_compiles_with_inductor() -> None:
    """By default test_gmm.py and test_expert_ffn.py compile the same operators without factors."""
    check_compile(with_factors(ffn_call(SKEWED)), "inductor")
    check_compile(gmm_call(SKEWED), "inductor")


def test_unrouted_tokens_get_no_gradient(path: str) -> None:
    call = with_factors(ffn_call(UNROUTED))
    assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


@pytest.mark.parametrize("trained", ["gate", "up", "down"])
def test_factors_alone_need_products_with_r_columns(trained: str) -> None:
    """Where neither x nor a matrix is trained, the backward of `a` and `b` multiplies nothing by the matrix itself."""
    call = with_factors(ffn_call(SKEWED, bias=False, weights=None)).trainable()
    for name, tensor in call.floats().items():
        tensor.requires_grad_(name.startswith(f"{trained}_factors"))
    with ops.force_aten(True):
        out = call()[0]
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            out.sum().backward()
    shapes = [event.input_shapes for event in profiler.events() if event.name == "aten::mm"]
    sizes = {(left[1], right[1]) for left, right, *_ in shapes}
    hidden_size, width = SKEWED.hidden_size, SKEWED.intermediate_size
    # The gradient of the activations needs down; nothing needs gate or up.
    assert (width, hidden_size) not in sizes
    assert ((hidden_size, width) in sizes) == (trained != "down")
