"""expert_ffn with `recompute`: the same bits, with fewer saved tensors."""

from typing import Any

import pytest
import torch

from support.ffn_call import ffn_call, with_fused_gate
from support.operator_calls import Call, assert_same, refusal, result, saved_for_backward
from support.operator_checks import check_compile, check_registrations
from support.shapes import SEVERAL_BLOCKS, SKEWED, UNROUTED, Shape, each_shape

VARIANTS: dict[str, dict[str, Any]] = {
    "gated, biases, clipped": {"activation": "swigluoai", "limit": 0.75},
    "gated": {"bias": False},
    "plain, biases": {"gated": False, "activation": "relu2"},
    "plain, no weights": {"gated": False, "bias": False, "weights": None},
}
each_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def recomputed(call: Call) -> Call:
    return call.replace(recompute=True)


@each_variant
@each_shape
def test_every_shape_gives_the_same_bits(path: str, shape: Shape, options: dict[str, Any]) -> None:
    call = ffn_call(shape, **options)
    assert_same(result(recomputed(call)), result(call))


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_gives_the_same_bits(path: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    call = ffn_call(SEVERAL_BLOCKS, **options).cast(dtype)
    assert_same(result(recomputed(call)), result(call))


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_gate_within_up_gives_the_same_bits(every_path: str, layout: str) -> None:
    call = with_fused_gate(ffn_call(SKEWED), layout)
    assert_same(result(recomputed(call)), result(call))


@pytest.mark.parametrize("trained", ["x", "weights", "gate", "down", "up_bias"])
def test_gradient_of_one_argument_alone(every_path: str, trained: str) -> None:
    call = ffn_call(SKEWED)
    gradients = []
    for variant in (call, recomputed(call)):
        leaf = call.arguments[trained].clone().requires_grad_()
        variant.replace(**{trained: leaf})()[0].square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_saves_its_arguments_alone(every_path: str, dtype: torch.dtype) -> None:
    call = recomputed(ffn_call(SKEWED).cast(dtype)).trainable()
    arguments = {tensor.data_ptr() for tensor in (*call.tensors().values(), *call.arguments["plan"][:4])}
    with saved_for_backward() as saved:
        call()
    assert not [tensor.shape for tensor in saved if tensor.numel() and tensor.data_ptr() not in arguments]


def test_backward_runs_again_from_a_retained_graph(every_path: str) -> None:
    call = recomputed(ffn_call(SKEWED)).trainable()
    leaves = list(call.floats().values())
    loss = call()[0].square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, leaves), strict=True):
        assert torch.equal(one, other)


def test_second_derivatives(path: str) -> None:
    call = recomputed(ffn_call(UNROUTED, activation="gelu"))
    names = [name for name, value in call.floats().items() if value.numel()]

    def function(*values: torch.Tensor) -> torch.Tensor:
        return call.replace(**dict(zip(names, values, strict=True)))()[0]

    values = [call.arguments[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradgradcheck(function, values, fast_mode=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_opcheck(path: str, gated: bool) -> None:
    check_registrations(recomputed(ffn_call(SKEWED, gated=gated, activation="silu")))


@pytest.mark.sampled(1)
def test_compiles(path: str) -> None:
    check_compile(recomputed(ffn_call(SKEWED)), "aot_eager")


def test_backward_refuses_preactivations() -> None:
    call = ffn_call(SKEWED, bias=False).cast(torch.float32)
    arguments = dict(call.arguments)
    plan = arguments.pop("plan")
    routed = {"slots": plan.slots, "rows": plan.rows, "group_sizes": plan.group_sizes, "top_k": plan.top_k}
    mask = [True] * 5 + [False] * 9
    rows = {
        "preactivations": torch.randn(60, 12),
        "reduced": torch.randn(60, 0),
        "gate_preactivations": torch.randn(60, 0),
    }
    given = {"grad_out": torch.randn(20, 12), **rows, "output_mask": mask}
    with refusal("expert_ffn_backward", "preactivations", "recompute", "[60, 12]"):
        torch.ops.maxmoe.expert_ffn_backward(**given, **arguments, **routed, recompute=True)
