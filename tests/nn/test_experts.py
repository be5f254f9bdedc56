"""Custom activations: silu written out is the name in all results and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import maxmoe
from maxmoe import MoE, MoEConfig, ops, reference
from support.moe_layers import SIZES, make, outcome, tokens
from support.operator_calls import assert_same


def silu(gate: Tensor | None, up: Tensor) -> Tensor:
    return up * torch.sigmoid(up) if gate is None else gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("options", [{"gated": False}, {"implementation": "dense"}, {"num_shared_experts": 2}], ids=str)
def test_a_function_as_activation(options: dict[str, Any], recompute: bool) -> None:
    named = make(expert_bias=True, **options)
    own = MoE(MoEConfig(**SIZES, expert_bias=True, **options), dtype=torch.float64, activation=silu)
    own.load_state_dict(named.state_dict())
    parts = ["experts", "shared_experts"] if "num_shared_experts" in options else ["experts"]
    maxmoe.set_recompute(own, parts if recompute else [])
    x, mask = tokens(named, 3, 7), torch.rand(3, 7) < 0.8
    assert_same(outcome(own, x, token_mask=mask), outcome(named, x, token_mask=mask), 1e-11)


@pytest.mark.parametrize("fused_gate", [None, "concatenated", "interleaved"])
def test_an_activation_of_the_operator(fused_gate: str | None) -> None:
    x, plan = torch.randn(9, 7).double(), ops.ragged_plan(torch.randint(6, (9, 2)), 6)
    gate, up, down = torch.randn(6, 7, 5).double(), torch.randn(6, 7, 5).double(), torch.randn(6, 5, 7).double()
    expected = reference.expert_ffn(x, None, plan, gate, up, down, activation="gelu")
    given: tuple[Any, Any] = {
        None: (gate, up),
        "concatenated": (None, torch.cat([gate, up], 2)),
        "interleaved": (None, torch.stack([gate, up], 3).flatten(2)),
    }[fused_gate]
    options: dict[str, Any] = {"activation": lambda g, u: functional.gelu(g) * u, "fused_gate": fused_gate}
    torch.testing.assert_close(ops.expert_ffn(x, None, plan, *given, down, **options), expected, rtol=1e-12, atol=1e-12)
    for name in ("limit", "gate_softcap", "up_softcap"):
        with pytest.raises(ValueError, match=rf"{name} must be None with a function as activation.*, got 7.0"):
            ops.expert_ffn(x, None, plan, *given, down, **options, **{name: 7.0})
