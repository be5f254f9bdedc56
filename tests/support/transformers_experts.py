"""Experts of transformers, run with their own code and with maxmoe."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation

from support.documented import docs_module
from support.operator_calls import assert_near
from support.small_models import WithoutFloat32

families: Any = docs_module("family_tables")

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
    """Small experts with the defaults of their family."""
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
    """The results of the family's own code, and its results with maxmoe."""
    with WithoutFloat32() if inputs[0].dtype == torch.float64 else nullcontext():
        expected, got = outcome(experts, "eager", inputs), outcome(experts, "maxmoe", inputs)
    assert expected["output"] is not None and expected["output"].any()
    for name, value in expected.items():
        assert value is None or (got[name] is not None and got[name].dtype == value.dtype), name
        assert_near(got[name], value, relative, name)


# Every layout that the interface declares


class DeclaredExperts(nn.Module):
    """Experts whose own code reads the parameters according to the flags."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        flags, D, F = config.flags, HIDDEN_SIZE, INTERMEDIATE_SIZE
        self.num_experts, self.act_fn = NUM_EXPERTS, config.act_fn
        self.first, width = ("gate_up_proj", 2 * F) if flags["has_gate"] else ("up_proj", F)
        for name, inner, outer in ((self.first, D, width), ("down_proj", F, D)):
            shape = (inner, outer) if flags["is_transposed"] else (outer, inner)
            setattr(self, name, nn.Parameter(torch.empty(NUM_EXPERTS, *shape)))
            if flags["has_bias"]:
                setattr(self, f"{name}_bias", nn.Parameter(torch.empty(NUM_EXPERTS, outer)))
        self.post_expert_norm = nn.RMSNorm(D) if flags["has_post_expert_norm"] else None

    def project(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        matrix = getattr(self, name)[expert]
        x = x @ (matrix if self.is_transposed else matrix.T)
        return x + getattr(self, f"{name}_bias")[expert] if self.has_bias else x

    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(NUM_EXPERTS):
            token, k = (index == expert).nonzero(as_tuple=True)
            inner = self.project(hidden_states[token], self.first, expert)
            gate, up = inner, 1.0
            if self.has_gate:
                gate, up = inner.chunk(2, -1) if self.is_concatenated else inner.unflatten(-1, (-1, 2)).unbind(-1)
            rows = self.project(self.act_fn(gate) * up, "down_proj", expert)
            rows = rows if self.post_expert_norm is None else self.post_expert_norm(rows)
            out = out.index_add(0, token, rows * weights[token, k, None])
        return out


def declared(act_fn: Any, **flags: bool) -> Any:
    """An instance of a new class, because the decorator changes the class."""
    off = dict.fromkeys(("is_transposed", "has_bias", "has_post_expert_norm"), False)
    flags = {"is_concatenated": True, "has_gate": True, **off, **flags}
    experts_class = use_experts_implementation(type("Experts", (DeclaredExperts,), {}), **flags)
    config = SimpleNamespace(_experts_implementation="eager", act_fn=act_fn, flags=flags)
    return initialise(experts_class(config), torch.float64)
