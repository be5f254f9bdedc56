"""Experts of transformers, run with their own code and with maxmoe."""

from typing import Any

import torch
from torch import Tensor, nn

from maxmoe.integrations.transformers import families
from support.operator_calls import assert_near

NUM_TOKENS, TOP_K, NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE = 11, 3, 5, 7, 3
WITHOUT_TOKENS = 3  # the expert that gets none


def initialise(experts: nn.Module, dtype: torch.dtype) -> Any:
    """Parameters of any kind, at a size that keeps the values near one."""
    generator = torch.Generator().manual_seed(3)
    for parameter in experts.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = (values / 2).to(dtype)
    return experts


def small(experts_class: type[nn.Module], dtype: torch.dtype = torch.float64) -> Any:
    """Experts with the defaults of their family."""
    return initialise(families.small_experts(experts_class), dtype)


def routed(dtype: torch.dtype, weights_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts and weights as a router gives them: an expert once per token, one without tokens."""
    generator = torch.Generator().manual_seed(5)
    hidden_states = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator, dtype=torch.float64)
    scores[:, WITHOUT_TOKENS] = -1
    weights, experts = scores.topk(TOP_K, dim=1)
    return hidden_states.to(dtype), experts, weights.to(weights_dtype or dtype)


def outcome(experts: Any, implementation: str, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor | None]:
    """The output, and the gradients of the inputs and of all parameters."""
    experts.config._experts_implementation = implementation
    hidden_states, index, weights = inputs
    hidden_states, weights = hidden_states.detach().requires_grad_(), weights.detach().requires_grad_()
    out = experts(hidden_states, index, weights)
    names, parameters = zip(*experts.named_parameters(), strict=True)
    generator = torch.Generator().manual_seed(7)
    along = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    gradients = torch.autograd.grad(out, (hidden_states, weights, *parameters), along, allow_unused=True)
    return {"output": out.detach(), **dict(zip(("hidden_states", "weights", *names), gradients, strict=True))}


def assert_equals_eager(experts: Any, inputs: tuple[Tensor, Tensor, Tensor], relative: float) -> None:
    """What the family computes itself, and what it computes with maxmoe."""
    expected, got = outcome(experts, "eager", inputs), outcome(experts, "maxmoe", inputs)
    assert expected["output"] is not None and expected["output"].any()
    for name, value in expected.items():
        assert value is None or (got[name] is not None and got[name].dtype == value.dtype), name
        assert_near(got[name], value, relative, name)
