"""expert_ffn through kernels and through ATen: rounding, and forward through one and backward through the other."""

import pytest
import torch
from torch import Tensor

from maxmoe import ops
from support.ffn_call import ffn_call
from support.operator_calls import Call, result
from support.shapes import SKEWED
from support.threads import in_threads

# Norm of the error in bfloat16 by the norm of the value in float64. One rounding is 1.66e-3; ATen rounds after every
# elementwise operation.
ROUNDING = {"out": 4.4e-3, "x": 4.7e-3, "gate": 4.5e-3, "up": 4.5e-3, "down": 4.4e-3, "weights": 4.4e-3}


def output_and_gradients(values: dict[str, Tensor], experts: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    plan = ops.ragged_plan(experts, len(values["up"]))
    out = Call("expert_ffn", {"plan": plan, **leaves})()[0]
    out.backward(cotangent.to(out.dtype))
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


def test_rounding_in_bfloat16(every_path: str) -> None:
    T, K, E, D, F = 256, 4, 8, 128, 96
    values = {"x": torch.randn(T, D), "gate": torch.randn(E, D, F) / D**0.5, "up": torch.randn(E, D, F) / D**0.5}
    values |= {"down": torch.randn(E, F, D) / F**0.5}
    values = {name: value.bfloat16() for name, value in values.items()}
    weights, experts = torch.randn(T, E).softmax(-1).topk(K)
    cotangent = torch.randn(T, D).bfloat16()
    got = output_and_gradients({**values, "weights": weights}, experts, cotangent)
    wide = {name: value.double() for name, value in {**values, "weights": weights}.items()}
    with ops.force_aten(False):
        exact = output_and_gradients(wide, experts, cotangent)
    errors = {name: ((got[name] - value).norm() / value.norm()).item() for name, value in exact.items()}
    assert all(error < ROUNDING[name] for name, error in errors.items()), errors


def test_force_aten_of_two_threads() -> None:
    """force_aten applies to all threads, so that the end of the first context would end the second one."""

    def enter() -> None:
        with ops.force_aten():
            pass

    with ops.force_aten(), pytest.raises(RuntimeError, match="and another thread is in its context"):
        in_threads(enter)
    in_threads(enter)


@pytest.mark.parametrize("is_forced", [False, True])
def test_backward_through_the_other_path(is_forced: bool) -> None:
    """force_aten may begin or end between forward and backward. The paths order the preactivations differently."""
    call = ffn_call(SKEWED)
    cotangent = torch.randn(call()[0].shape, dtype=torch.float64)
    trained = call.trainable()
    with ops.force_aten(is_forced):
        (out,) = trained()
    with ops.force_aten(not is_forced):
        out.backward(cotangent)
    for name, expected in result(call, cotangents=[cotangent]).gradients.items():
        torch.testing.assert_close(trained.arguments[name].grad, expected, rtol=1e-12, atol=1e-12)
