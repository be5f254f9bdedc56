"""maxmoe as an experts implementation of transformers, one class of experts at a time."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from transformers.activations import ACT2CLS, ACT2FN, SiLUActivation
from transformers.integrations.moe import use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from maxmoe.integrations.transformers import families
from maxmoe.integrations.transformers.gates import fused_gate
from support.transformers_experts import (
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    NUM_EXPERTS,
    assert_equals_eager,
    initialise,
    outcome,
    routed,
    small,
)

ROOT = Path(__file__).parents[2]
TOLERANCE = {torch.float64: 2e-6, torch.float32: 3e-5}  # some families compute partly in float32


# Every class of the installed transformers


def test_the_families_are_found() -> None:
    assert len(families.models()) >= 55
    assert {"mixtral", "gpt_oss", "nemotron_h", "muse_spark"} < set(families.models())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("model", families.models())
def test_equals_the_code_of_the_family(path: str, model: str, dtype: torch.dtype) -> None:
    classes = families.experts_classes(model)
    assert classes
    for experts_class in classes:
        experts = small(experts_class, dtype)
        assert all(5 in parameter.shape for name, parameter in experts.named_parameters() if "norm" not in name)
        for limit in {"limit", "swiglu_limit"} & vars(experts).keys():
            setattr(experts, limit, 0.75)  # so low that something is clipped
        assert_equals_eager(experts, routed(dtype), TOLERANCE[dtype])


def test_the_table_is_up_to_date() -> None:
    text = (ROOT / "docs/families.md").read_text()
    version = re.search(r"from transformers (\S+) ", text)
    assert version is not None
    if version[1] != transformers.__version__:
        pytest.skip(f"docs/families.md is of transformers {version[1]}, installed is {transformers.__version__}")
    assert text == families.document()


# Every layout that the interface declares


class DeclaredExperts(nn.Module):
    """Its own code reads the parameters as its flags say."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        flags, D, F = config.flags, HIDDEN_SIZE, INTERMEDIATE_SIZE
        self.num_experts = NUM_EXPERTS
        first = "gate_up_proj" if flags["has_gate"] else "up_proj"
        width = 2 * F if flags["has_gate"] else F
        for name, inner, outer in ((first, D, width), ("down_proj", F, D)):
            shape = (inner, outer) if flags["is_transposed"] else (outer, inner)
            setattr(self, name, nn.Parameter(torch.empty(NUM_EXPERTS, *shape)))
            if flags["has_bias"]:
                setattr(self, f"{name}_bias", nn.Parameter(torch.empty(NUM_EXPERTS, outer)))
        self.first = first
        self.act_fn = config.act_fn
        if flags["has_post_expert_norm"]:
            self.post_expert_norm = nn.RMSNorm(D)

    def project(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        matrix = getattr(self, name)[expert]
        x = x @ (matrix if self.is_transposed else matrix.T)
        return x + getattr(self, f"{name}_bias")[expert] if self.has_bias else x

    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(NUM_EXPERTS):
            token, k = (index == expert).nonzero(as_tuple=True)
            inner = self.project(hidden_states[token], self.first, expert)
            if not self.has_gate:
                inner = self.act_fn(inner)
            elif self.is_concatenated:
                inner = self.act_fn(inner[:, :INTERMEDIATE_SIZE]) * inner[:, INTERMEDIATE_SIZE:]
            else:
                inner = self.act_fn(inner[:, ::2]) * inner[:, 1::2]
            rows = self.project(inner, "down_proj", expert)
            rows = self.post_expert_norm(rows) if self.has_post_expert_norm else rows
            out = out.index_add(0, token, rows * weights[token, k, None])
        return out


class Config:
    _experts_implementation = "eager"

    def __init__(self, act_fn: Any, **flags: bool) -> None:
        self.act_fn, self.flags = act_fn, flags


def declared(act_fn: Any, **flags: bool) -> Any:
    """An instance of a class of its own: the decorator changes the class."""
    flags = {
        "is_concatenated": True,
        "is_transposed": False,
        "has_bias": False,
        "has_gate": True,
        "has_post_expert_norm": False,
        **flags,
    }
    body = {name: vars(DeclaredExperts)[name] for name in ("__init__", "project", "forward")}
    experts_class = use_experts_implementation(type("Experts", (DeclaredExperts,), body), **flags)
    return initialise(experts_class(Config(act_fn, **flags)), torch.float64)


FLAGS = ("is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm")


@pytest.mark.parametrize("act_fn", [ACT2FN["silu"], ACT2FN["mish"]], ids=["known", "unknown"])
@pytest.mark.parametrize("values", list(product([False, True], repeat=5)), ids=str)
def test_every_declared_layout(path: str, values: tuple[bool, ...], act_fn: Any) -> None:
    experts = declared(act_fn, **dict(zip(FLAGS, values, strict=True)))
    assert_equals_eager(experts, routed(torch.float64), 1e-13)


# Activations and gates: recognised exactly, or computed by the family


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


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_of_the_activation_are_called(kind: str) -> None:
    experts = declared(ACT2FN["silu"])
    calls = []
    getattr(experts.act_fn, f"register_{kind}_hook")(lambda *arguments: calls.append(kind))
    assert_equals_eager(experts, routed(torch.float64), 1e-13)
    calls.clear()
    outcome(experts, "maxmoe", routed(torch.float64))
    assert calls == [kind]
