"""Adapters of PEFT beside experts: a step takes less memory than one stack of matrices."""

import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import maxmoe
import maxmoe.integrations.transformers  # registers "maxmoe"
from maxmoe.adapters import _peft as connection
from support.memory import MARGIN, SELF_CONTAINED, at_most

T, D, F, E, K = 16, 512, 256, 64, 2
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")


class OfTransformers(nn.Module):
    """Experts of transformers, and a routing."""

    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E)
        config._experts_implementation = "maxmoe"
        self.experts = MixtralExperts(config)
        nn.init.normal_(self.experts.gate_up_proj, std=0.02)
        nn.init.normal_(self.experts.down_proj, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x, torch.arange(T * K).view(T, K) % E, torch.ones(T, K))
        return out


class OfMaxmoe(nn.Module):
    """A MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = maxmoe.MoE(maxmoe.MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=K))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).hidden_states


@pytest.fixture(params=[OfTransformers, OfMaxmoe])
def model(request: pytest.FixtureRequest) -> nn.Module:
    model = request.param()
    stacks = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    return get_peft_model(model, LoraConfig(r=4, target_parameters=stacks, target_modules=[]))


def step(model: nn.Module, x: Tensor) -> None:
    """Forward and backward; the gradients of x and of the adapters stay."""
    x.grad = None
    model.zero_grad()
    model(x).square().sum().backward()


def assert_lean(model: nn.Module) -> None:
    """Take a step in less memory than the smallest stack of matrices, after one that is not limited."""
    sizes = [parameter.nbytes for parameter in model.parameters() if parameter.dim() == 3]
    assert min(sizes) >= SELF_CONTAINED
    x = torch.randn(T, D, requires_grad=True)
    step(model, x)
    with at_most(min(sizes) - MARGIN):
        step(model, x)
    assert x.grad is not None and x.grad.any()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_step_takes_less_memory_than_one_stack_of_matrices(model: nn.Module) -> None:
    assert_lean(model)


def test_the_sum_of_weights_and_adapters_takes_more(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT alone, without the connection, adds the product of the factors to the weights."""
    monkeypatch.setattr(connection, "takes", lambda module, parameter: False)
    with pytest.raises(RuntimeError, match="allocate memory"):
        assert_lean(model)
