"""Activations and gates of transformers: recognised exactly, or computed by the family."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.activations import ACT2CLS, ACT2FN, SiLUActivation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from maxmoe.integrations.transformers.gates import fused_gate
from support.transformers_experts import assert_equals_eager, declared, families, initialise, outcome, routed, small

# Families with a custom gate that `expert_ffn` computes.
FUSED = ["beam", "deepseek_v4", "glm5_next", "gpt_oss", "hy_v4", "hy_v4_vl", "inkling2", "inkling2_loop",
         "minimax_m3_vl", "openai_privacy_filter"]  # fmt: skip


@pytest.mark.parametrize("name", sorted(ACT2CLS))
def test_every_activation(name: str) -> None:
    for has_gate in (True, False):
        assert_equals_eager(declared(ACT2FN[name], has_gate=has_gate), routed(torch.float64), 1e-13)


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"])
def test_plain_activations_are_fused(name: str) -> None:
    assert fused_gate(declared(ACT2FN[name])) is not None


@pytest.mark.parametrize("model", FUSED)
def test_gates_of_families_are_fused(model: str) -> None:
    for experts_class in families.experts_classes(model):
        assert fused_gate(small(experts_class)) is not None


class TwiceSiLU(SiLUActivation):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class OwnGate(GptOssExperts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return 2 * super()._apply_gate(gate_up)


def test_a_derived_activation_is_not_its_base() -> None:
    assert_equals_eager(declared(TwiceSiLU()), routed(torch.float64), 1e-13)


@pytest.mark.parametrize("changes", [{"__class__": OwnGate}, {"alpha": 1.5}, {"limit": 0.5}], ids=str)
def test_changed_experts_of_gpt_oss(changes: dict[str, Any]) -> None:
    """A derived gate is not its base, and another constant is not the published one."""
    experts = small(GptOssExperts)
    for name, value in changes.items():
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


# Step-3.7, whose experts have no interface in transformers, and a limit of their layer


@pytest.mark.parametrize(
    ("limit", "gate"),
    [
        (None, {"activation": "silu", "limit": None}),
        (0.25, {"activation": "silu", "limit": 0.25, "limit_target": "output"}),
        (0.0, None),  # is left to the family: a config cannot set it, because 0 means no limit there
    ],
)
def test_experts_of_step3p7(limit: float | None, gate: dict[str, Any] | None) -> None:
    module = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    sizes = {"num_local_experts": 5, "hidden_size": 7, "moe_intermediate_size": 3}
    experts = module.Step3p7Experts(module.Step3p7TextConfig(**sizes), swiglu_limit=limit)
    assert fused_gate(experts) == gate
    if gate is None:
        return
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-5)):
        assert_equals_eager(initialise(experts, dtype), routed(dtype), tolerance)
