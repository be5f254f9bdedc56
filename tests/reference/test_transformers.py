"""The specification against the blocks of published models, as transformers computes them."""

import copy

import pytest
import torch

from maxmoe import MoE, reference
from support.small_models import block_of

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "family",
    ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "llama4", "longcat_flash", "nemotron_h"],
)
def test_equals_the_block_of_transformers(family: str) -> None:
    """With the config and the parameters of the converted layer, whose own numbers tests/convert compares."""
    block = block_of(family)
    layer = MoE.from_transformers(copy.deepcopy(block))
    x = torch.randn(2, 8, 16, requires_grad=True)
    cotangent = torch.randn(2, 8, 16)

    theirs = block(x)
    theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).reshape(x.shape)
    ours, _, tokens_per_expert, dropped = reference.moe(x, layer.config, layer.state_dict())

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(outputs, x, cotangent)[0] for outputs in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert tokens_per_expert.sum() == 16 * layer.config.top_k and dropped == 0


def test_balance_loss_is_that_of_transformers() -> None:
    """The loss of transformers is a sum over the K choices, ours a mean."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(2, 16, 6)
    experts = logits.topk(2).indices
    ours = reference.load_balance_loss(logits, experts, score_function="softmax", scope="batch")
    theirs = load_balancing_loss_func((logits.flatten(0, 1),), num_experts=6, top_k=2)
    torch.testing.assert_close(2 * ours, theirs)
