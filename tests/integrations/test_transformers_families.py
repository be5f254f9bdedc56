"""The experts of every family of the installed transformers, run with their own code and with maxmoe."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from itertools import product

import transformers

from maxmoe.integrations.transformers.gates import fused_gate
from support.transformers_experts import (
    assert_equals_eager,
    families,
    routed,
    small,
)

ROOT = Path(__file__).parents[2]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5}


def test_the_families_are_found() -> None:
    assert len(families.models()) >= 55
    assert {"mixtral", "gpt_oss", "nemotron_h", "muse_spark"} < set(families.models())


@pytest.mark.parametrize("model", families.sparse_models())
def test_every_model_with_experts_is_replaced_or_lacks_something(model: str) -> None:
    """A new family of transformers is an error here: it needs a preset, or a line in docs/family_tables.py."""
    assert len([*families.replaced_as(model)[:1], *families.missing(model)]) == 1


def test_models_with_experts_are_found() -> None:
    """All families that take experts implementations, and others."""
    others = {"dbrx", "doge", "jetmoe", "llama4", "longcat_flash", "nllb_moe", "switch_transformers"}
    assert set(families.models()) | others <= set(families.sparse_models())
    assert not {"llama", "bert", "t5"} & set(families.sparse_models())


@pytest.mark.parametrize("model", families.models())
def test_equals_the_code_of_the_family(path: str, model: str) -> None:
    classes = families.experts_classes(model)
    assert classes
    for experts_class, dtype in product(classes, TOLERANCE):
        experts = small(experts_class, dtype)
        assert all(5 in parameter.shape for name, parameter in experts.named_parameters() if "norm" not in name)
        lower_constants(experts)
        assert_equals_eager(experts, routed(dtype), TOLERANCE[dtype])


def lower_constants(experts: Any) -> None:
    """Set limits and softcaps so low that they change the results."""
    for limit in {"limit", "swiglu_limit"} & vars(experts).keys():
        setattr(experts, limit, 0.75)
    for softcap in (module for module in experts.modules() if hasattr(module, "softcap")):
        softcap.softcap /= 8


# Families with a custom gate that `expert_ffn` computes.
FUSED = [
    "beam",
    "deepseek_v4",
    "glm5_next",
    "gpt_oss",
    "hy_v4",
    "hy_v4_vl",
    "inkling2",
    "inkling2_loop",
    "minimax_m3_vl",
    "openai_privacy_filter",
]


@pytest.mark.parametrize("model", FUSED)
def test_a_gate_of_its_own_runs_on_one_operator(model: str) -> None:
    for experts_class in families.experts_classes(model):
        assert fused_gate(small(experts_class)) is not None


def test_the_table_is_up_to_date() -> None:
    text = (ROOT / "docs/families.md").read_text()
    version = re.search(r"from transformers (\S+) ", text)
    assert version is not None
    if version[1] != transformers.__version__:
        pytest.skip(f"docs/families.md is of transformers {version[1]}, installed is {transformers.__version__}")
    assert text == families.document()
