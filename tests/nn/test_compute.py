"""How the experts are computed: sparse or dense, with dropped slots, in 16 bits, compiled, on any threads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import MoE
from support.moe_layers import (
    COMPUTE,
    DEEPSEEK,
    FAMILIES,
    GPT_OSS,
    LLAMA4,
    Options,
    assert_meets_specification,
    each_compute,
    each_family,
    make,
    outcome,
    tokens,
)
from support.operator_calls import Result, assert_near, assert_same, strided, tolerance
from support.operator_checks import compile_whole
from support.pairwise import pairwise

LOSSES: Options = {"load_balance_loss_weight": 0.3, "router_z_loss_weight": 0.2}
ONE_EACH: Options = {"hidden_size": 3, "num_experts": 2, "top_k": 1, "normalization": "none"}


def twin(layer: MoE, **options: Any) -> MoE:
    """A layer with the same parameters and other options."""
    other = make(layer.router.weight.dtype, **{**vars(layer.config), **options})
    other.load_state_dict(layer.state_dict())
    return other


# Sparse and dense


@each_family
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dense_is_sparse(every_path: str, dtype: torch.dtype, options: Options) -> None:
    sparse = make(dtype, **options)
    x = tokens(sparse, 3, 9)
    expected = outcome(sparse, x)
    for changes in ({}, {"capacity_factor": 6.0}):
        dense = twin(sparse, implementation="dense", **changes)
        assert_same(outcome(dense, x), expected, 4 * tolerance(dtype, 2))
    # The rows of all slots: 1.0, or 2.0 if half of the slots are of experts that compute no row.
    every_row = sparse.config.num_selectable_experts / sparse.config.num_experts
    assert_same(outcome(twin(sparse, buffer_factor=every_row), x), expected)
    assert_same(outcome(twin(sparse, buffer_factor=6.0), x), expected)


@each_compute
def test_an_expert_without_tokens_is_never_heard(every_path: str, compute: Options) -> None:
    """Infinite and NaN parameters of an expert without tokens reach no result, not even times zero."""
    layer = make(score_correction_bias=True, top_k=1, normalization="none", expert_bias=True, **compute)
    assert layer.router.score_correction_bias is not None
    layer.router.score_correction_bias[4] = -100.0
    x = tokens(layer)
    expected = outcome(layer, x)
    assert expected.outputs[2][4] == 0
    with torch.no_grad():
        layer.experts.up_proj[4] = float("nan")
        layer.experts.down_proj[4] = float("inf")
    got = outcome(layer, x)
    assert_near(got.outputs[0], expected.outputs[0], 1e-14, "hidden_states")
    for name in ("x", "router.weight"):
        assert_near(got.gradients[name], expected.gradients[name], 1e-14, f"gradient of {name}")


# Dropped slots


def first_entry_chooses(**options: Any) -> MoE:
    """Tokens with a positive first entry go to expert 0, the others to expert 1."""
    layer = make(**{**ONE_EACH, **options})
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, 0] = torch.tensor([1.0, -1.0])
    return layer


def test_capacity_drops_the_last_tokens_of_an_expert_in_each_sequence() -> None:
    layer = first_entry_chooses(implementation="dense", capacity_factor=1.0)
    x = tokens(layer, 2, 4)
    x[..., 0] = torch.tensor([[1.0, 1.0, -1.0, 1.0], [-1.0, 1.0, -1.0, 1.0]])
    everything = twin(layer, capacity_factor=None)(x)
    hidden_states, _, stats = layer(x)
    # Two places for each of the two experts: the third token of expert 0 in the first sequence has none.
    assert (stats.dropped.item(), stats.tokens_per_expert.tolist()) == (1, [5, 3])
    assert not hidden_states[0, 3].any()
    kept = torch.ones(2, 4, dtype=torch.bool)
    kept[0, 3] = False
    # The others keep their weights.
    torch.testing.assert_close(hidden_states[kept], everything.hidden_states[kept])
    # As one sequence of eight there are four places for each, and five tokens for expert 0.
    assert layer(x.flatten(0, 1)).stats.dropped == 1
    assert not layer(x.flatten(0, 1)).hidden_states[7].any()


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 1.3, 2.0, 6.0])
@pytest.mark.parametrize("shape", [(1,), (2, 1), (2, 5), (1, 2, 7)], ids=str)
def test_capacity_is_that_of_the_specification(every_path: str, shape: tuple[int, ...], factor: float) -> None:
    layer = make(implementation="dense", capacity_factor=factor, **LOSSES)
    with torch.no_grad():
        layer.router.weight[3:] *= 0.1  # leaves some experts too much
    assert_meets_specification(layer, tokens(layer, *shape))


def test_capacity_beyond_the_slots_of_a_sequence_costs_nothing() -> None:
    """A sequence of one token has two slots: the buffer has two rows per expert, not the capacity of 64."""
    layer = make(implementation="dense", num_experts=64, top_k=2, capacity_factor=64.0)
    x = tokens(layer, 3, 1)
    dispatched = layer.runner.dispatcher.dispatch(x.flatten(0, 1), layer.router(x.flatten(0, 1)).top_k, 3)()
    assert dispatched.x.shape[0] == 64 * 3 * 2 and dispatched.dropped == 0
    assert_meets_specification(layer, x)


@pytest.mark.parametrize("factor", [0.01, 0.2, 0.5, 0.99, 1.0])
def test_buffer_drops_the_last_experts_and_counts(every_path: str, factor: float) -> None:
    layer = make(buffer_factor=factor, **LOSSES)
    x = tokens(layer, 2, 5)
    stats = layer(x).stats
    assert stats.dropped == 30 - int(30 * factor)
    got = outcome(layer, x)
    kept = (stats.tokens_per_expert.cumsum(0) - stats.tokens_per_expert) < int(30 * factor)
    gradient = got.gradients["experts.down_proj"]
    assert gradient is not None
    trained = gradient.flatten(1).any(1)
    assert torch.equal(trained, kept & (stats.tokens_per_expert > 0))
    assert_meets_specification(layer, x)


@pytest.mark.parametrize("compute", [COMPUTE["buffer"], COMPUTE["capacity"]], ids=["buffer", "capacity"])
def test_dropped_tokens_pass_nothing_on(compute: Options) -> None:
    """Dropped tokens get no output and no gradient, except from the shared expert."""
    layer = first_entry_chooses(num_shared_experts=1, **compute)
    x = tokens(layer, 1, 10).requires_grad_()
    with torch.no_grad():
        x[..., 0] = -1.0
    hidden_states, _, stats = layer(x)
    first_dropped = 10 - int(stats.dropped)
    assert 0 < first_dropped < 10
    assert layer.shared_experts is not None
    shared = layer.shared_experts(x.flatten(0, 1))
    torch.testing.assert_close(hidden_states[0, first_dropped:], shared[first_dropped:])
    cotangent = torch.randn_like(hidden_states)
    cotangent[:, :first_dropped] = 0.0
    parameters = [layer.router.weight, layer.experts.up_proj]
    of_x, *gradients = torch.autograd.grad(hidden_states, [x, *parameters], cotangent)
    torch.testing.assert_close(of_x, torch.autograd.grad(shared, x, cotangent[0])[0])
    assert not any(gradient.any() for gradient in gradients)


# Inputs


def test_any_number_of_dimensions() -> None:
    layer = make(implementation="sparse", num_shared_experts=1)
    x = tokens(layer, 2, 3, 4)
    expected = outcome(layer, x)
    for shape in ((24, 7), (6, 4, 7), (1, 2, 3, 4, 7)):
        got = outcome(layer, x.reshape(shape))
        assert got.outputs[0].shape == shape
        assert torch.equal(got.outputs[0].reshape(x.shape), expected.outputs[0])
        assert torch.equal(got.outputs[2], expected.outputs[2])


@pytest.mark.parametrize("layout", ["transposed", "columns", "rows", "expanded"])
@pytest.mark.parametrize("shape", [(13,), (4, 5)], ids=str)
@each_compute
def test_strides_do_not_matter(every_path: str, compute: Options, shape: tuple[int, ...], layout: str) -> None:
    layer = make(num_shared_experts=1, shared_expert_gate=True, **compute)
    x = strided(tokens(layer, *shape), layout)
    assert_same(outcome(layer, x), outcome(layer, x.contiguous()), 1e-13)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(7), r"x must have shape \[\.\.\., S, hidden_size \(7\)\], got \(7,\)"),
        (torch.ones(()), r"x must have shape \[\.\.\., S, hidden_size \(7\)\], got \(\)"),
        (torch.ones(2, 5, 8), r"x must have shape \[\.\.\., S, hidden_size \(7\)\], got \(2, 5, 8\)"),
        (torch.ones(5, 7).bfloat16(), r"x must have the dtype .*torch\.float32.*, got torch\.bfloat16"),
        (torch.ones(5, 7).double(), r"x must have the dtype .*torch\.float32.*, got torch\.float64"),
        (torch.ones(5, 7).long(), r"x must have the dtype .*torch\.float32.*, got torch\.int64"),
        (torch.ones(5, 7, device="meta"), r"must be on the device of .*\(meta\), got cpu"),
    ],
    ids=lambda value: "" if isinstance(value, str) else f"{tuple(value.shape)}-{value.dtype}-{value.device}",
)
@each_compute
def test_refuses_and_names_both(compute: Options, x: Tensor, message: str) -> None:
    layer = make(torch.float32, num_shared_experts=1, shared_expert_gate=True, **compute)
    with pytest.raises(ValueError, match=message):
        layer(x)


# 16 bits


@pytest.mark.parametrize(
    ("family", "name", "dtype"), pairwise([[*FAMILIES], [*COMPUTE], [torch.bfloat16, torch.float16]]), ids=str
)
def test_autocast(path: str, dtype: torch.dtype, name: str, family: str) -> None:
    """Results are close and in the autocast dtype, for any dtype of x; routing, losses and gradients stay float32."""
    layer = make(torch.float32, **FAMILIES[family], **COMPUTE[name])
    for x in (tokens(layer, 2, 9), tokens(layer, 2, 9).to(dtype)):
        expected = outcome(layer, x.float())
        with torch.autocast("cpu", dtype=dtype):
            got = outcome(layer, x)
        assert got.outputs[0].dtype == dtype
        assert torch.equal(got.outputs[1], expected.outputs[1])
        for name, gradient in got.gradients.items():
            assert gradient is not None and gradient.dtype == (x.dtype if name == "x" else torch.float32)
        # The upstream gradients differ by their rounding to 16 bits; through ATen activations are rounded, too.
        assert_same(got, expected, tolerance(dtype, 8 if path == "cpu" else 10))


# Threads


@pytest.mark.parametrize("options", [DEEPSEEK, LLAMA4, {"buffer_factor": 0.6}], ids=["deepseek", "llama4", "buffer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_repeatable_for_any_number_of_threads(dtype: torch.dtype, options: Options) -> None:
    layer = make(dtype, hidden_size=66, intermediate_size=35, **{**options, "router_bias": True})
    x = tokens(layer, 2, 350)
    first = outcome(layer, x)
    for threads in (1, 2, 4, 4):
        torch.set_num_threads(threads)
        assert_same(outcome(layer, x), first)


# torch.compile


def close(got: Result, expected: Result, dtype: torch.dtype = torch.float64) -> None:
    assert_same(got, expected, 4 * tolerance(dtype, 1))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({**DEEPSEEK}, marks=pytest.mark.sampled(2)),
        pytest.param({**GPT_OSS, **COMPUTE["buffer"]}, marks=pytest.mark.sampled(2)),
        pytest.param({**LLAMA4, **COMPUTE["capacity"], **LOSSES}, marks=pytest.mark.slow),
        pytest.param(COMPUTE["dense"], marks=pytest.mark.slow),
    ],
    ids=["deepseek", "gpt_oss_buffer", "llama4_capacity", "dense"],
)
def test_compiles_as_one_graph(path: str, options: Options) -> None:
    """By default, test_padding.py alone compiles a dense one."""
    layer = make(**options)
    x = tokens(layer)
    close(outcome(layer, x, compile_whole(layer, "aot_eager")), outcome(layer, x))


@pytest.mark.parametrize("options", [{}, pytest.param(DEEPSEEK, marks=pytest.mark.slow)], ids=["plain", "deepseek"])
def test_compiles_with_inductor(options: Options) -> None:
    layer = make(torch.float32, **options)
    x = tokens(layer)
    compiled = compile_whole(layer, "inductor")
    close(outcome(layer, x, compiled), outcome(layer, x), torch.float32)


def test_compiles_under_autocast() -> None:
    layer = make(torch.float32, **DEEPSEEK)
    x = tokens(layer)
    compiled = compile_whole(layer, "aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(outcome(layer, x, compiled), outcome(layer, x), tolerance(torch.bfloat16, 4))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [None, True])
@each_compute
def test_does_not_compile_again_for_other_numbers_of_tokens(compute: Options, dynamic: bool | None) -> None:
    layer = make(**LOSSES, **compute)
    compilations = []

    def backend(graph: Any, _: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    compiled = compile_whole(layer, backend, dynamic=dynamic)
    for length in (5, 6, 9, 17, 40):
        x = tokens(layer, 2, length)
        for one, other in zip(compiled(x)[:2], layer(x)[:2], strict=True):
            torch.testing.assert_close(one, other)
    assert len(compilations) == (1 if dynamic else 2)  # the second compilation has a dynamic size


@pytest.mark.sampled(1)
@each_compute
def test_has_no_graph_break_in_a_model_that_has_some(compute: Options) -> None:
    torch._dynamo.reset()
    layer = make(**LOSSES, **compute)
    explanation = torch._dynamo.explain(layer)(tokens(layer))
    assert (explanation.graph_count, explanation.graph_break_count) == (1, 0)
