"""The norm of the decoder against torch's, which autograd records operator by operator."""

import pytest
import torch
from torch import Tensor, nn

from maxmoe.models.blocks import Norm
from support.memory import saved_for_backward


def norms(dtype: torch.dtype) -> tuple[Norm, nn.RMSNorm, Tensor]:
    ours, theirs = Norm(7, 1e-3, dtype=dtype), nn.RMSNorm(7, 1e-3, dtype=dtype)
    weight = torch.randn(7, dtype=dtype)
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
    return ours, theirs, torch.randn(3, 5, 7, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_torch(dtype: torch.dtype) -> None:
    ours, theirs, x = norms(dtype)
    results = []
    for norm in (ours, theirs):
        given = x.clone().requires_grad_()
        output = norm(given)
        (output * torch.linspace(-1, 1, 7, dtype=dtype)).sum().backward()
        results.append((output, given.grad, norm.weight.grad))
    assert torch.equal(results[0][0], results[1][0])
    tolerance = 16 * torch.finfo(dtype).eps
    for got, expected in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_gradients_of_every_kind() -> None:
    norm, _, x = norms(torch.float64)
    x = x[:2, :1].clone()

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    arguments = (x.requires_grad_(), norm.weight.detach().clone().requires_grad_())
    assert torch.autograd.gradcheck(compute, arguments, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(compute, arguments)


def test_saves_its_input_alone() -> None:
    norm, _, x = norms(torch.float32)
    with saved_for_backward() as saved:
        norm(x.requires_grad_())
    assert {each.data_ptr() for each in saved} == {x.data_ptr(), norm.weight.data_ptr()}
