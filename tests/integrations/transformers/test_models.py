"""Whole models of transformers with maxmoe as their experts implementation, against their own code."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")


from finetuning import models
from maxmoe.integrations.transformers import experts, patched_families
from pretraining import InputError
from support.operator_checks import compile_whole
from support.replaced_models import assert_same, step
from support.slow_cases import by_default
from support.small_models import WithoutFloat32

WITH_BALANCE_LOSS = {"mixtral", "qwen3_moe", "olmoe", "gpt_oss"}
# Models whose config needs more than small numbers; test_experts.py tests their experts.
NOT_SMALL = {"dots3_note", "dots3_note_text", "gemma4", "gemma4_text", "lfm2_moe", "mimo_v2_flash", "qwen4_exp"}
NOT_SMALL |= {"qwen4_exp_text"}
# Models that have no experts in the first two layers, or other ones in later layers.
FOUR_LAYERS = {"beam", "deepseek_v4", "flint", "qwen4_exp", "qwen4_exp_text"}
OPTIONS = {"hidden_size": 64, "intermediate_size": 13, "num_experts": 7, "seed": 0}


def build(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """A small model with its own code, and with every kind of loss that it has."""
    top_k = 1 if family == "zaya" else 2  # the only value that it supports
    num_layers = 4 if family in FOUR_LAYERS else 2
    options = Namespace(family=family, top_k=top_k, num_layers=num_layers, **OPTIONS)
    model = models.small_model(options, "eager").to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # large enough to differ
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = True
    return model


def tokens(length: int = 9) -> Tensor:
    return torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(2))


@contextmanager
def operators_called() -> Iterator[list[Mock]]:
    """The operators: an implementation that is silently ignored would have the same results, too."""
    with ExitStack() as stack:
        names = ((experts, "expert_ffn"), (experts, "gmm"), (patched_families, "expert_ffn"))
        yield [stack.enter_context(patch.object(module, name, wraps=getattr(module, name))) for module, name in names]


def are_called(operators: list[Mock]) -> bool:
    return any(operator.called for operator in operators)


def values(model: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)  # some routers add noise
    return step(model, tokens())


# By default one of each kind: test_experts.py compares the experts of all.
KINDS = {"beam", "deepseek_v3", "gpt_oss", "llama4_text", "mixtral", "nemotron_h", "olmoe", "qwen3_moe", "zaya"}


@pytest.mark.parametrize("family", by_default(models.family_names(), KINDS & {*models.family_names()}))
def test_equals_the_code_of_the_model(family: str) -> None:
    if family in NOT_SMALL:
        with pytest.raises(InputError, match="cannot make a small model of the family"):
            build(family)
        return
    model = build(family)
    with WithoutFloat32(), operators_called() as operators:
        expected = values(model)
        assert not are_called(operators)
        model.set_experts_implementation("maxmoe")
        assert_same(values(model), expected, None, 1e-12)
        assert are_called(operators)
    assert family not in WITH_BALANCE_LOSS or expected["aux_loss"] > 0


def test_the_block_of_llama4_compiles_without_graph_breaks() -> None:
    """It is patched. test_experts.py compiles the experts of other families."""
    model = build("llama4_text")
    model.set_experts_implementation("maxmoe")
    block = model.model.layers[0].feed_forward
    x = torch.randn(2, 9, OPTIONS["hidden_size"], dtype=torch.float64, requires_grad=True)

    def result(function: Any) -> tuple[Tensor, ...]:
        out, _ = function(x)
        leaves = [x, *(parameter for parameter in block.parameters() if parameter.requires_grad)]
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    for got, expected in zip(result(compile_whole(block, "aot_eager")), result(block), strict=True):
        torch.testing.assert_close(got, expected)
