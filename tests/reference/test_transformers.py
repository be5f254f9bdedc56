"""The specification against the blocks of published models, as transformers computes them."""

from typing import Any

import pytest
import torch

from maxmoe import reference
from support.published_blocks import (
    deepseek_v3,
    gpt_oss,
    llama4,
    longcat_flash,
    mixtral,
    nemotron_h,
    qwen2_moe,
    qwen3_moe,
)

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "family", [mixtral, qwen3_moe, qwen2_moe, deepseek_v3, gpt_oss, llama4, longcat_flash, nemotron_h]
)
def test_equals_the_block_of_transformers(family: Any) -> None:
    block, config, parameters = family()
    x = torch.randn(2, 8, 12, requires_grad=True)
    cotangent = torch.randn(2, 8, 12)
    leaves = [x, *block.parameters()]

    theirs = block(x)
    theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).reshape(x.shape)
    expected = torch.autograd.grad((theirs * cotangent).sum(), leaves)
    ours, aux_loss, tokens_per_expert, dropped = reference.moe(x, config, parameters)
    gradients = torch.autograd.grad((ours * cotangent).sum(), leaves)

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for ours_of, theirs_of in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours_of, theirs_of, rtol=1e-4, atol=1e-4)
    assert tokens_per_expert.sum() == 16 * config.top_k
    assert (aux_loss.item(), dropped.item()) == (0.0, 0)


def test_balance_loss_is_that_of_transformers() -> None:
    """The loss of transformers is a sum over the K choices, ours a mean."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(2, 16, 6)
    experts = logits.topk(2).indices
    ours = reference.load_balance_loss(logits, experts, score_function="softmax", scope="batch")
    theirs = load_balancing_loss_func((logits.flatten(0, 1),), num_experts=6, top_k=2)
    torch.testing.assert_close(2 * ours, theirs)
