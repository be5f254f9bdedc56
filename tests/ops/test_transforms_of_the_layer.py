"""The layer under forward-mode AD and a second backward; `OperatorTests` has the same tests for every operator."""

from typing import Any

import pytest
import torch
from torch import Tensor

import maxmoe
from support.operator_checks import ignore_warnings_of_transforms

OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek": {"score_function": "sigmoid", "score_correction_bias": True, "num_groups": 2, "top_k_groups": 1}
    | {"num_shared_experts": 1, "load_balance_loss_weight": 0.1},
    "gpt_oss": {"activation": "swigluoai", "activation_limit": 0.7, "expert_bias": True, "normalization": "softmax"},
}
STEP = 1e-6


def make(options: dict[str, Any]) -> maxmoe.MoE:
    config = maxmoe.MoEConfig(hidden_size=5, intermediate_size=4, num_experts=4, top_k=2, **options)
    return maxmoe.MoE(config, dtype=torch.float64)


@ignore_warnings_of_transforms
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tangents_equal_finite_differences(path: str, options: dict[str, Any], trained: bool) -> None:
    layer = make(options).requires_grad_(trained)
    x, direction = torch.randn(2, 6, 5, dtype=torch.float64)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        output = layer(x.unsqueeze(0))
        return output.hidden_states, output.aux_loss

    _, tangents = torch.func.jvp(function, (x,), (direction,))
    with torch.no_grad():
        above, below = function(x + STEP * direction), function(x - STEP * direction)
    for tangent, one, other in zip(tangents, above, below, strict=True):
        torch.testing.assert_close(tangent.detach(), (one - other) / (2 * STEP), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_second_backward_equals_finite_differences(path: str, options: dict[str, Any]) -> None:
    """The second backward of the squared norm of all gradients, as in a gradient penalty."""
    layer = make(options)
    x, direction = torch.randn(2, 1, 6, 5, dtype=torch.float64)

    def penalty(x: Tensor) -> Tensor:
        output = layer(x)
        loss = output.hidden_states.square().sum() + output.aux_loss
        gradients = torch.autograd.grad(loss, [x, *layer.parameters()], create_graph=True)
        return sum((gradient.square().sum() for gradient in gradients), torch.zeros(()))

    (gradient,) = torch.autograd.grad(penalty(x.requires_grad_()), x)
    above, below = (penalty((x + step * direction).detach().requires_grad_()) for step in (STEP, -STEP))
    expected = ((above - below) / (2 * STEP)).detach()
    torch.testing.assert_close((gradient * direction).sum(), expected, rtol=1e-6, atol=1e-6)
