"""Compiled autograd records the backward of a layer, and computes its gradients."""

import pytest
import torch
from torch._dynamo import compiled_autograd

import maxmoe

SIZES = {"hidden_size": 16, "intermediate_size": 8, "num_experts": 4, "top_k": 2}


# Torch hides this warning from users, but not from a filter that raises.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [{}, {"num_shared_experts": 1, "score_function": "sigmoid", "load_balance_loss_weight": 0.1}], ids=str
)
def test_gradients_are_those_of_eager(options: dict[str, object]) -> None:
    layer, x = maxmoe.MoE(maxmoe.MoEConfig(**SIZES, **options)), torch.randn(2, 5, 16, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        leaves = [x, *layer.parameters()]
        for leaf in leaves:
            leaf.grad = None
        hidden_states, aux_loss, _ = layer(x)
        (hidden_states.square().sum() + aux_loss).backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        got = gradients()
    torch._dynamo.reset()
    for actual, value in zip(got, expected, strict=True):
        assert torch.equal(actual, value)
