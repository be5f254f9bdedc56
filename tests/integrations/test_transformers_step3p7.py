"""Step-3.7, whose experts have no interface in transformers: "maxmoe" computes them, other names their own code."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers.models.step3p7")

from transformers.models.step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts, Step3p7TextModel

from maxmoe.integrations.transformers import experts as implementation
from maxmoe.integrations.transformers.gates import fused_gate
from support.operator_calls import assert_near
from support.small_models import WithoutFloat32
from support.transformers_experts import assert_equals_eager, initialise, routed

SIZES = {"num_local_experts": 5, "hidden_size": 7, "moe_intermediate_size": 3}


def small_experts(limit: float | None, dtype: torch.dtype = torch.float64) -> Any:
    return initialise(Step3p7Experts(Step3p7TextConfig(**SIZES), swiglu_limit=limit), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("limit", "expected"), [(None, {}), (0.25, {"limit": 0.25, "limit_target": "output"})], ids=["", "limited"]
)
def test_experts_with_the_limit_of_their_layer(
    limit: float | None, expected: dict[str, Any], dtype: torch.dtype
) -> None:
    experts = small_experts(limit, dtype)
    assert fused_gate(experts) == {"activation": "silu", "limit": None} | expected
    assert_equals_eager(experts, routed(dtype), 1e-12 if dtype == torch.float64 else 3e-5)


def test_a_limit_of_zero_is_left_to_the_family() -> None:
    """A config cannot set it, because 0 means no limit there."""
    assert fused_gate(small_experts(0.0)) is None


def test_the_model_with_limits_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    expert_ffn = implementation.expert_ffn
    monkeypatch.setattr(implementation, "expert_ffn", lambda *a, **b: called.append(b["limit"]) or expert_ffn(*a, **b))
    model = small_model()
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(2))
    model.set_experts_implementation("eager")
    with WithoutFloat32():
        expected = step(model, ids)
        assert not called
        model.set_experts_implementation("maxmoe")
        got = step(model, ids)
    assert called == [None, 0.02]
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_near(got[name], value, 1e-12, name)


def small_model() -> Any:
    config = Step3p7TextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        share_expert_dim=12,
        num_local_experts=5,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        mlp_layer_types=["dense", "sparse", "sparse"],
        swiglu_limits=[0.0, 0.0, 0.02],
        swiglu_limits_shared=[0.0, 0.0, 0.03],
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Step3p7TextModel(config).double()


def step(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """The hidden states and all gradients of the sum of their squares."""
    model.zero_grad()
    hidden_states = model(input_ids=ids, use_cache=False).last_hidden_state
    hidden_states.square().sum().backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {"hidden_states": hidden_states.detach(), **gradients}
