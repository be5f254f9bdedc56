"""maxmoe as an experts implementation of transformers: every family, layout of parameters, input and dtype."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from support.named import named
from support.operator_checks import compile_whole
from support.slow_cases import by_default
from support.transformers_experts import (
    HIDDEN_SIZE,
    NUM_EXPERTS,
    assert_equals_eager,
    declared,
    families,
    outcome,
    routed,
    small,
)

ROOT = Path(__file__).parents[3]
FLAGS = ("is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm")
# One of each kind: silu; interleaved, transposed, bias; norm after the experts; custom gates (not in every
# version); no gate.
KINDS = ["mixtral", "gpt_oss", "muse_spark", "beam", "inkling2", "nemotron_h"]
KINDS = [name for name in KINDS if name in families.models()]
each_kind = pytest.mark.parametrize("model", KINDS)


@pytest.mark.parametrize("model", families.models())
def test_equals_the_code_of_the_family(model: str) -> None:
    classes = families.experts_classes(model)
    assert classes
    for experts_class, (dtype, tolerance) in product(classes, ((torch.float64, 1e-12), (torch.float32, 3e-5))):
        experts = small(experts_class, dtype)
        assert all(5 in parameter.shape for name, parameter in experts.named_parameters() if "norm" not in name)
        lower_constants(experts)
        assert_equals_eager(experts, routed(dtype), tolerance)


def lower_constants(experts: Any) -> None:
    """Set limits and softcaps so low that they change the results."""
    for limit in {"limit", "swiglu_limit"} & vars(experts).keys():
        setattr(experts, limit, 0.75)
    for softcap in (module for module in experts.modules() if hasattr(module, "softcap")):
        softcap.softcap /= 8


def test_every_model_with_experts_is_replaced_or_lacks_something() -> None:
    """A new family of transformers is an error here: it needs a preset, or a line in docs/family_tables.py."""
    others = {"dbrx", "doge", "jetmoe", "llama4", "longcat_flash", "nllb_moe", "switch_transformers"}
    assert len(families.models()) >= 55
    assert set(families.models()) | others <= set(families.sparse_models())
    assert not {"llama", "bert", "t5"} & set(families.sparse_models())
    for model in families.sparse_models():
        assert len([*families.replaced_as(model)[:1], *families.missing(model)]) == 1, model


def test_the_table_is_up_to_date() -> None:
    text = (ROOT / "docs/families.md").read_text()
    version = re.search(r"from transformers (\S+) ", text)
    assert version is not None
    if version[1] != transformers.__version__:
        pytest.skip(f"docs/families.md is of transformers {version[1]}, installed is {transformers.__version__}")
    assert text == families.document()


# Layouts of parameters


@pytest.mark.parametrize("act_fn", [ACT2FN["silu"], ACT2FN["mish"]], ids=["known", "unknown"])
def test_every_declared_layout(act_fn: Any) -> None:
    for values in product([False, True], repeat=len(FLAGS)):
        flags = dict(zip(FLAGS, values, strict=True))
        with named(flags):
            assert_equals_eager(declared(act_fn, **flags), routed(torch.float64), 1e-13)


@pytest.mark.parametrize("experts_class", [MixtralExperts, GptOssExperts])
def test_gradients_are_written_into_the_layout_of_the_parameters(experts_class: type[nn.Module]) -> None:
    """The only tensors that the backward allocates in the size of the parameters are their two gradients."""
    experts = small(experts_class)
    experts.config._experts_implementation = "maxmoe"
    out = experts(*routed(torch.float64))
    smallest = min(experts.gate_up_proj.numel(), experts.down_proj.numel())
    large: dict[int, tuple[int, ...]] = {}

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(results):
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and tensor.numel() >= smallest:
                    large[tensor.untyped_storage().data_ptr()] = tuple(tensor.shape)
            return results

    with Record():
        out.sum().backward()
    assert len(large) == 2
    for parameter in (experts.gate_up_proj, experts.down_proj):
        assert parameter.grad.stride() == parameter.stride()


# Inputs


def test_experts_of_other_ranks_are_left_out() -> None:
    """Experts of other ranks, marked as in transformers by ids >= num_experts and weight 0; their rows may be NaN."""
    experts = small(MixtralExperts)
    experts._is_expert_parallel = True
    hidden_states, index, weights = routed(torch.float64)
    is_elsewhere = torch.rand(index.shape) < 0.5
    is_elsewhere[0] = True
    weights = weights.masked_fill(is_elsewhere, 0.0)
    expected = outcome(experts, "eager", (hidden_states, index.masked_fill(is_elsewhere, NUM_EXPERTS), weights))
    hidden_states[0] = float("nan")
    index = torch.where(is_elsewhere, NUM_EXPERTS + torch.arange(3), index)
    got = outcome(experts, "maxmoe", (hidden_states, index, weights))
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_an_expert_that_does_not_exist_is_refused() -> None:
    hidden_states, index, weights = routed(torch.float64)
    index[2, 1] = NUM_EXPERTS
    with pytest.raises(ValueError, match=r"ragged_plan: .*5"):
        outcome(small(MixtralExperts), "maxmoe", (hidden_states, index, weights))


def test_no_tokens() -> None:
    experts = small(MixtralExperts)
    empty = tuple(value[:0] for value in routed(torch.float64))
    got = outcome(experts, "maxmoe", empty)
    assert got["output"].shape == (0, HIDDEN_SIZE)
    assert not any(value.any() for value in got.values())


@each_kind
@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bfloat16(model: str, weights_dtype: torch.dtype) -> None:
    """Routers of some families keep their weights in float32. `assert_equals_eager` compares the dtypes, too."""
    experts = small(families.experts_classes(model)[0], torch.bfloat16)
    assert_equals_eager(experts, routed(torch.bfloat16, weights_dtype), 0.03)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_returns_the_dtype_of_its_input(model: str, dtype: torch.dtype) -> None:
    experts = small(families.experts_classes(model)[0], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equals_eager(experts, routed(dtype, torch.float32), 0.03)


@pytest.mark.parametrize("model", by_default(KINDS, {"beam", "nemotron_h"} & {*KINDS}))
def test_compiles_without_graph_breaks(model: str) -> None:
    experts = small(families.experts_classes(model)[0])
    inputs = routed(torch.float64)
    expected = outcome(experts, "maxmoe", inputs)
    experts.forward = compile_whole(experts.forward, "aot_eager")
    for name, value in outcome(experts, "maxmoe", inputs).items():
        torch.testing.assert_close(value, expected[name], msg=name)
