"""Activations and gates of transformers: recognised exactly, or computed by the family."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers.activations import ACT2CLS, ACT2FN, SiLUActivation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from maxmoe.integrations.transformers.gates import fused_gate
from support.transformers_experts import (
    assert_equals_eager,
    declared,
    outcome,
    routed,
    small,
)


@pytest.mark.parametrize("has_gate", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("name", sorted(ACT2CLS))
def test_every_activation(name: str, has_gate: bool) -> None:
    experts = declared(ACT2FN[name], has_gate=has_gate)
    assert_equals_eager(experts, routed(torch.float64), 1e-13)


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"])
def test_plain_activations_are_fused(name: str) -> None:
    assert fused_gate(declared(ACT2FN[name])) is not None


class TwiceSiLU(SiLUActivation):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class OwnGate(GptOssExperts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return 2 * super()._apply_gate(gate_up)


def test_a_derived_activation_is_not_its_base() -> None:
    assert_equals_eager(declared(TwiceSiLU()), routed(torch.float64), 1e-13)


def test_a_derived_gate_is_not_its_base() -> None:
    experts = small(GptOssExperts)
    experts.__class__ = OwnGate
    assert_equals_eager(experts, routed(torch.float64), 1e-13)


@pytest.mark.parametrize(("name", "value"), [("alpha", 1.5), ("limit", 0.5)])
def test_other_constants_of_gpt_oss(name: str, value: float) -> None:
    experts = small(GptOssExperts)
    setattr(experts, name, value)
    assert_equals_eager(experts, routed(torch.float64), 1e-13)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_the_activation_are_called(kind: str) -> None:
    experts = declared(ACT2FN["silu"])
    calls = []
    getattr(experts.act_fn, f"register_{kind}_hook")(lambda *arguments: calls.append(kind))
    assert_equals_eager(experts, routed(torch.float64), 1e-13)
    calls.clear()
    outcome(experts, "maxmoe", routed(torch.float64))
    assert calls == [kind]
